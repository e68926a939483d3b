/* Decisions before training: fits, estimates, memory, and the search for ChunkSize and K, with random descriptions. */

#include "fuzz.h"

#include "tools/chunkflow_tune.h"

#include <stdlib.h>
#include <string.h>

enum { MOST_STAGES = 6, WILD = 14 };

typedef struct problem {
    fuzz_input in;
    int wild;
    cf_model model;
    cf_gpu gpu;
    cf_tune_desc desc;
    cf_timing timing;
    cf_stage_cost stages[MOST_STAGES];
    cf_stage_bytes bytes[MOST_STAGES];
    int64_t layers[MOST_STAGES], chunk_sizes[3], ks[3], lengths[12];
    int64_t n;
} problem;

static void draw_model(problem *p) {
    fuzz_input *in = &p->in;
    p->model = *cf_model_find("qwen2.5-7b");
    if (fuzz_chance(in, 2)) p->model.layers = fuzz_mostly(in, 1, 12, p->wild);
    if (fuzz_chance(in, 3)) p->model.kv_heads = fuzz_mostly(in, 1, 28, p->wild);
    if (fuzz_chance(in, 4)) p->model.hidden = fuzz_mostly(in, 1, 5000, p->wild);
    if (fuzz_chance(in, 4)) p->model.head_dim = fuzz_mostly(in, 0, 256, p->wild);
    if (fuzz_chance(in, 4)) p->model.vocab = fuzz_mostly(in, 1, 200000, p->wild);
    if (fuzz_chance(in, 4)) p->model.ffn = fuzz_mostly(in, 1, 20000, p->wild);
    p->gpu = *cf_gpu_find("h100-80g");
    if (fuzz_chance(in, 4)) p->gpu.memory = fuzz_mostly(in, 1, INT64_MAX, p->wild);
    if (p->wild > 0 && fuzz_chance(in, 4)) p->gpu.flops = fuzz_real(in);
    if (p->wild > 0 && fuzz_chance(in, 4)) p->gpu.launch = fuzz_real(in);
}

static void draw_parallel(problem *p, cf_parallel *parallel) {
    static const int64_t tp[] = {0, 1, 2, 4, 7};
    fuzz_input *in = &p->in;
    int64_t i;
    memset(parallel, 0, sizeof *parallel);
    parallel->tp = p->wild > 0 && fuzz_chance(in, p->wild) ? fuzz_number(in) : tp[fuzz_between(in, 0, 4)];
    parallel->pp = fuzz_mostly(in, 0, 3, p->wild);
    parallel->n_virtual = fuzz_mostly(in, 0, 2, p->wild);
    parallel->placement = (cf_placement)fuzz_between(in, 0, CF_PLACEMENT_COUNT);
    parallel->dp = fuzz_mostly(in, 0, 2, p->wild);
    parallel->zero = fuzz_mostly(in, -1, 3, p->wild);
    parallel->no_sequence = fuzz_chance(in, 3);
    parallel->recompute = (cf_recompute)fuzz_between(in, 0, CF_RECOMPUTE_COUNT);
    if (fuzz_chance(in, 4)) parallel->recompute_layers = fuzz_mostly(in, 0, 8, p->wild);
    if (p->wild == 0 && parallel->n_virtual < 2) parallel->placement = CF_PLACEMENT_DEFAULT;
    if (p->wild == 0 && parallel->recompute <= CF_RECOMPUTE_NONE) parallel->recompute_layers = 0;
    if (fuzz_chance(in, 4)) parallel->vocab_multiple = fuzz_mostly(in, 0, 128, p->wild);
    for (i = 0; i < MOST_STAGES; i++) p->layers[i] = fuzz_mostly(in, 0, 8, p->wild);
    if (fuzz_chance(in, 5) && parallel->pp <= 3 && parallel->n_virtual <= 2) parallel->layers = p->layers;
}

static void draw_memory(problem *p, cf_memory_desc *memory) {
    fuzz_input *in = &p->in;
    memory->loss = (cf_loss)fuzz_between(in, 0, CF_LOSS_COUNT);
    if (fuzz_chance(in, 4)) memory->activation_bytes = fuzz_mostly(in, 0, 8, p->wild);
    if (fuzz_chance(in, 4)) memory->optimizer_bytes = fuzz_mostly(in, 0, 16, p->wild);
    if (fuzz_chance(in, 4)) memory->state_bytes = fuzz_mostly(in, 0, 8, p->wild);
    if (fuzz_chance(in, 4)) memory->runtime_bytes = fuzz_mostly(in, 0, INT64_MAX, p->wild);
    if (fuzz_chance(in, 4)) memory->fragmentation = fuzz_mostly(in, -1, 30, p->wild);
}

/* Lists that rise, most of the time, and begin anew after numbers past all bounds. */
static int64_t draw_list(problem *p, int64_t *list, int64_t low, int64_t high) {
    int64_t n = fuzz_between(&p->in, 1, 3), i, at = 0;
    for (i = 0; i < n; i++) {
        if (at < -(INT64_MAX / 4) || at > INT64_MAX / 4) at = 0;
        list[i] = at = fuzz_mostly(&p->in, low + at, high + at, p->wild);
    }
    return n;
}

static void draw_search(problem *p) {
    static const cf_schedule_kind kinds[] = {CF_SCHEDULE_PAPER, CF_SCHEDULE_1F1B, CF_SCHEDULE_BEST};
    cf_tune_desc *d = &p->desc;
    fuzz_input *in = &p->in;
    int64_t i;
    d->parallel.pp = d->parallel.pp ? d->parallel.pp : 1;
    if (fuzz_chance(in, 5)) d->n_gpus = fuzz_mostly(in, 0, 8, p->wild);
    if (fuzz_chance(in, 5)) d->gpus_per_node = fuzz_mostly(in, 0, 8, p->wild);
    d->timing = fuzz_draw_timing(in, &p->timing, p->stages, MOST_STAGES, p->wild);
    if (p->wild > 0 && fuzz_chance(in, 5)) d->step_seconds = fuzz_real(in);
    for (i = 0; i < MOST_STAGES; i++) {
        memset(&p->bytes[i], 0, sizeof p->bytes[i]);
        p->bytes[i].held.activations = fuzz_mostly(in, 1, 100, p->wild);
        p->bytes[i].held.state = fuzz_mostly(in, 0, 100, p->wild);
        p->bytes[i].per_token_pass = fuzz_mostly(in, 0, 100, p->wild);
        p->bytes[i].fixed = fuzz_mostly(in, 0, 1000, p->wild);
    }
    if (fuzz_chance(in, 3)) d->bytes = p->bytes;
    if (d->bytes) d->limit_bytes = fuzz_mostly(in, 0, 20000, p->wild);
    else if (fuzz_chance(in, 3)) d->limit_bytes = fuzz_mostly(in, 0, INT64_MAX, p->wild);
    d->chunk_sizes = p->chunk_sizes;
    d->n_chunk_sizes = draw_list(p, p->chunk_sizes, 4, 64);
    d->ks = p->ks;
    d->n_ks = draw_list(p, p->ks, 1, 3);
    d->kinds = &kinds[fuzz_between(in, 0, 2)];
    d->n_kinds = 1;
    d->split_backward = fuzz_chance(in, 3) && (p->wild > 0 || *d->kinds == CF_SCHEDULE_BEST);
    d->max_tries = fuzz_between(in, 1, 3);
    d->batch = fuzz_mostly(in, 1, 6, p->wild);
    d->n_batches = fuzz_mostly(in, 1, 3, p->wild);
    d->n_exact = fuzz_mostly(in, 0, 3, p->wild);
    d->seed = (uint64_t)fuzz_between(in, 0, 255);
}

/* As fuzz_draw_stream, last. */
static void draw_stream(problem *p) {
    if (fuzz_chance(&p->in, 3)) p->desc.memory.state_window = fuzz_mostly(&p->in, 0, 300, p->wild);
    p->desc.no_stream = fuzz_chance(&p->in, 2) && (p->wild > 0 || p->desc.memory.state_window == 0);
    if (p->desc.timing) fuzz_draw_stream(&p->in, &p->timing, p->wild);
}

/* Returns whether more stages are asked for than the arrays of the description have, which nobody can check. */
static int lacks_stages(const problem *p) {
    const cf_parallel *parallel = &p->desc.parallel;
    if (p->desc.bytes == NULL && (p->desc.timing == NULL || p->desc.timing->stages == NULL)) return 0;
    return parallel->pp > MOST_STAGES || parallel->n_virtual > MOST_STAGES / (parallel->pp > 1 ? parallel->pp : 1);
}

/* Batches of CF_MAX_LENGTH tokens in chunks of a few are sound, and take hours. */
static int takes_long(const problem *p) {
    int64_t i, tokens = 0;
    for (i = 0; i < p->n; i++) tokens += p->lengths[i] > 2000 ? 2000 : p->lengths[i] < 0 ? 0 : p->lengths[i];
    for (i = 0; i < p->n; i++)
        if (p->lengths[i] > 2000) return 1;
    return tokens > 4000 || p->desc.batch > 100 || p->desc.n_batches > 20 || p->desc.n_gpus > 64 ||
           p->desc.parallel.pp > 64 || p->desc.parallel.n_virtual > 64 || p->desc.parallel.dp > 64;
}

static void check_tuning(const problem *p, const cf_tuning *t) {
    int64_t i;
    FUZZ_CHECK(t->winner >= -1 && t->winner < t->n_candidates, "winner %lld", (long long)t->winner);
    for (i = 0; i < t->n_candidates; i++) {
        const cf_tune_candidate *c = &t->candidates[i];
        if (c->status != CF_TUNE_OK) continue;
        FUZZ_CHECK(c->bytes <= t->limit_bytes, "%lld bytes under a limit of %lld", (long long)c->bytes,
                   (long long)t->limit_bytes);
        FUZZ_CHECK(c->seconds >= c->bound * (1 - 1e-9), "%.17g seconds, bound %.17g", c->seconds, c->bound);
        FUZZ_CHECK(t->winner >= 0 && t->n_ranked > 0, "no winner, though something fits");
        FUZZ_CHECK(t->candidates[t->ranking[0]].seconds <= c->seconds, "the first of the ranking is slower");
    }
    if (t->winner >= 0) { /* no slower than the first of the ranking but by the tolerance, or what cannot be told */
        const cf_tune_candidate *w = &t->candidates[t->winner], *first = &t->candidates[t->ranking[0]];
        double tolerance = p->desc.tolerance > 0 || p->desc.tolerance < 0 ? p->desc.tolerance : 0.01;
        FUZZ_CHECK(w == first || w->behind <= first->seconds * tolerance * (1 + 1e-9) ||
                       w->behind <= w->behind_confidence, "the winner is slower");
    }
}

static void tune(problem *p) {
    cf_tuning *tuning = NULL;
    cf_error error = fuzz_error();
    int64_t i;
    draw_search(p);
    p->n = fuzz_between(&p->in, 1, 12);
    for (i = 0; i < p->n; i++) p->lengths[i] = fuzz_mostly(&p->in, 0, fuzz_chance(&p->in, 4) ? 400 : 60, p->wild);
    draw_stream(p);
    (void)cf_tune_defaults(&p->desc);
    if (takes_long(p) || lacks_stages(p)) return;
    if (!fuzz_result(cf_tune(p->lengths, p->n, &p->desc, &tuning, &error), &error)) {
        FUZZ_CHECK(tuning == NULL, "it failed, and wrote");
        return;
    }
    check_tuning(p, tuning);
    cf_tuning_free(tuning);
}

static void fit(problem *p) {
    cf_sample samples[24];
    cf_stage_cost cost;
    cf_fit fits[CF_COMPUTE_PASS_COUNT];
    cf_error error = fuzz_error();
    int64_t n = fuzz_between(&p->in, 0, 24), i;
    for (i = 0; i < n; i++) {
        samples[i].pass = (int)fuzz_mostly(&p->in, 0, 4, p->wild);
        samples[i].rows = fuzz_mostly(&p->in, 1, 4000, p->wild);
        samples[i].pairs = fuzz_mostly(&p->in, 0, 60000, p->wild);
        samples[i].seconds = fuzz_real(&p->in);
    }
    if (!fuzz_result(cf_cost_fit(samples, n, &cost, fits, &error), &error)) return;
    FUZZ_CHECK(cost.forward.constant >= 0 && cost.forward.per_token >= 0 && cost.forward.per_pair >= 0,
               "a cost below zero");
}

static void estimate(problem *p) {
    cf_memory_load loads[MOST_STAGES];
    cf_memory_report reports[MOST_STAGES];
    cf_stage_cost stages[MOST_STAGES];
    cf_cost_desc desc = {0};
    cf_timing timing;
    double step = 0;
    cf_error error = fuzz_error();
    cf_parallel full = cf_parallel_defaults(&p->desc.parallel);
    int small = full.pp >= 1 && full.pp <= 3 && full.n_virtual >= 1 && full.n_virtual <= 2;
    int64_t n_v = small ? full.pp * full.n_virtual : 1, i;
    desc.model = &p->model;
    desc.gpu = &p->gpu;
    desc.parallel = p->desc.parallel;
    desc.gpus_per_node = fuzz_mostly(&p->in, 0, 8, p->wild);
    desc.chunk_size = fuzz_mostly(&p->in, 0, 4096, p->wild);
    if (fuzz_result(cf_cost_estimate(&desc, stages, n_v, &timing, &step, &error), &error))
        FUZZ_CHECK(step >= 0 && stages[0].forward.per_token >= 0, "less than no time");
    p->desc.memory.model = &p->model;
    p->desc.memory.parallel = p->desc.parallel;
    memset(loads, 0, sizeof loads);
    for (i = 0; i < MOST_STAGES; i++) {
        loads[i].live_tokens = fuzz_mostly(&p->in, 0, 100000, p->wild);
        loads[i].chunk_tokens = fuzz_mostly(&p->in, 0, 10000, p->wild);
        loads[i].state_tokens = fuzz_mostly(&p->in, 0, 100000, p->wild);
    }
    draw_stream(p);
    error = fuzz_error();
    if (fuzz_result(cf_memory_estimate(&p->desc.memory, loads, n_v, reports, small ? full.pp : 1, &error), &error))
        FUZZ_CHECK(reports[0].total >= reports[0].parameters && reports[0].parameters >= 0, "less than no bytes");
}

static void run_tune(const uint8_t *data, size_t size) {
    problem p = {0};
    cf_plan plan = {0};
    int64_t kind, max_tries;
    p.in = fuzz_input_of(data, size);
    p.wild = fuzz_chance(&p.in, 3) ? WILD : 0;
    kind = fuzz_between(&p.in, 0, 5);
    draw_model(&p);
    p.desc.model = &p.model;
    p.desc.gpu = &p.gpu;
    draw_parallel(&p, &p.desc.parallel);
    draw_memory(&p, &p.desc.memory);
    if (kind == 0) fit(&p);
    else if (kind == 1) estimate(&p);
    else tune(&p);
    plan.chunks_per_rank = fuzz_number(&p.in);
    max_tries = cf_tune_max_tries(&plan, fuzz_number(&p.in), fuzz_number(&p.in));
    FUZZ_CHECK(max_tries == 0 || (max_tries >= 8 && max_tries <= 64), "%lld tries", (long long)max_tries);
}

const fuzz_target fuzz_tune = {"tune", run_tune, 200};
