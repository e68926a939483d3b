/* bench_offload.c - state that leaves the GPU between two passes of its group, against state streamed by layer

       cc -std=c99 -O2 -I. tools/bench/bench_offload.c -lm -o build/bench_offload && build/bench_offload LENGTHS

   Both models' numbers: bytes of the fullest GPU at its heaviest pass, and the makespan. LENGTHS: a list of short
   sequences' lengths, of which the first 64 that are shorter than 16K fill each batch up. Nothing is measured. */

#define CHUNKFLOW_IMPLEMENTATION
#define CHUNKFLOW_STATIC
#include "chunkflow.h"

#define CHUNKFLOW_TUNE_IMPLEMENTATION
#define CHUNKFLOW_TUNE_STATIC
#include "tools/chunkflow_tune.h"

#include <stdio.h>
#include <stdlib.h>

enum { MOST_STAGES = 8, SHORT = 64, MOST_LENGTHS = SHORT + 16, MOST_OUTCOMES = 256 };

typedef struct setup {
    cf_model model;
    int64_t tp, pp;
} setup;

/* What is done with the state of groups. */
typedef struct way {
    int offload; /* 1: it leaves between two passes of its group */
    double part; /* of the layers streams; 0: none */
} way;

typedef struct outcome {
    double seconds;
    int64_t bytes;
    cf_schedule_kind kind;
    int64_t k;
} outcome;

typedef struct outcomes {
    outcome of[MOST_OUTCOMES];
    int64_t n;
} outcomes;

static const cf_schedule_kind kinds[] = {CF_SCHEDULE_PAPER, CF_SCHEDULE_1F1B, CF_SCHEDULE_BEST};
static const int64_t ks[] = {1, 2, 4};
static const double rungs[] = {1, .9, .8, .7, .6, .5}; /* of the bytes that `best` would hold at once */

static void give_up(const cf_error *error) {
    fprintf(stderr, "bench_offload: %s: %s\n", error->field, error->text);
    exit(1);
}

/* Where only a part of the layers streams, they are not the first ones, and nothing of them is exposed. */
static cf_timing costs(const setup *s, const cf_plan *plan, double link, const way *w, cf_stage_cost *stages) {
    cf_gpu gpu = *cf_gpu_find("h100-80g");
    cf_cost_desc cost = {0};
    cf_timing timing;
    cf_error error;
    gpu.pcie = link / gpu.link;
    cost.model = &s->model;
    cost.gpu = &gpu;
    cost.parallel.tp = s->tp;
    cost.parallel.pp = s->pp;
    cost.parallel.recompute = CF_RECOMPUTE_SELECTIVE;
    cost.chunk_size = plan->chunk_size;
    cost.stream = w->part > 0;
    if (cf_cost_estimate(&cost, stages, s->pp, &timing, NULL, &error) != CF_OK) give_up(&error);
    timing.stream_forward *= w->part;
    timing.stream_backward *= w->part;
    if (w->part < 1) timing.stream_exposed = 0;
    return timing;
}

static int64_t fullest(const cf_memory_desc *desc, const cf_plan *plan, const cf_schedule *schedule) {
    cf_memory_report reports[MOST_STAGES];
    cf_error error;
    int64_t i, most = 0;
    if (cf_schedule_memory(desc, plan, schedule, reports, schedule->n_stages, NULL, &error) != CF_OK) give_up(&error);
    for (i = 0; i < schedule->n_stages; i++)
        if (reports[i].total > most) most = reports[i].total;
    return most;
}

/* With a part of the layers streamed: that part of what streaming saves. */
static int64_t weigh(const setup *s, const cf_plan *plan, const cf_schedule *schedule, const way *w) {
    cf_memory_desc desc = {0};
    int64_t stays, streams;
    desc.model = &s->model;
    desc.parallel.tp = s->tp;
    desc.parallel.pp = s->pp;
    desc.parallel.recompute = CF_RECOMPUTE_SELECTIVE;
    stays = fullest(&desc, plan, schedule);
    if (!(w->part > 0)) return stays;
    desc.state_window = 3 * 2048;
    streams = fullest(&desc, plan, schedule);
    return stays - (int64_t)(w->part * (double)(stays - streams));
}

static cf_bytes token_bytes(const setup *s, const way *w) {
    cf_memory_desc desc = {0};
    cf_token_bytes token;
    cf_bytes bytes = {0};
    cf_error error;
    desc.model = &s->model;
    desc.parallel.tp = s->tp;
    desc.parallel.pp = s->pp;
    desc.parallel.recompute = CF_RECOMPUTE_SELECTIVE;
    if (cf_memory_token_bytes(&desc, 0, &token, &error) != CF_OK) give_up(&error);
    bytes.per_token_activations = token.activations;
    bytes.per_token_state = (int64_t)((1 - w->part) * (double)token.state);
    bytes.per_token_state_gradient = (int64_t)((1 - w->part) * (double)token.state_gradient);
    bytes.per_token_boundary = (int64_t)((1 - w->part) * (double)token.boundary);
    return bytes;
}

/* One schedule, lowered; limit: of order->bytes, 0 for none. Returns the most of these bytes that a stage held; -1:
   there is no such schedule. */
static int64_t run(const setup *s, const cf_plan *plan, cf_schedule_desc *order, const way *w, outcomes *out) {
    cf_lower_desc lower = {0};
    cf_simulate_desc simulation = {0};
    cf_schedule *schedule = NULL, *lowered = NULL;
    cf_timeline *timeline = NULL;
    outcome *o = &out->of[out->n];
    cf_error error;
    cf_result result = cf_schedule_make(plan, order, &schedule, &error);
    int64_t i, most = 0;
    if (result == CF_ERROR_INFEASIBLE) return -1;
    if (result != CF_OK) give_up(&error);
    simulation.timing = lower.timing = order->timing;
    simulation.bytes = order->bytes;
    simulation.no_bounds = 1;
    lower.offload = w->offload;
    if (cf_schedule_lower(plan, schedule, &lower, &lowered, &error) != CF_OK) give_up(&error);
    if (cf_simulate(plan, lowered, &simulation, &timeline, &error) != CF_OK) give_up(&error);
    for (i = 0; i < s->pp; i++)
        if (timeline->peak_bytes[i] > most) most = timeline->peak_bytes[i];
    o->bytes = weigh(s, plan, lowered, w);
    o->seconds = timeline->makespan;
    o->kind = order->kind;
    o->k = order->k;
    out->n++;
    cf_timeline_free(timeline);
    cf_schedule_free(lowered);
    cf_schedule_free(schedule);
    return most;
}

/* Adds all orders: the fixed ones, and `best` under falling limits of bytes. */
static void run_all(const setup *s, const cf_plan *plan, double link, const way *w, outcomes *out) {
    cf_stage_cost stages[MOST_STAGES];
    cf_timing timing = costs(s, plan, link, w, stages);
    size_t i, j, r;
    for (i = 0; i < sizeof kinds / sizeof kinds[0]; i++)
        for (j = 0; j < sizeof ks / sizeof ks[0]; j++) {
            cf_schedule_desc order = {0};
            int64_t most = 1;
            order.kind = kinds[i];
            order.replay = CF_REPLAY_LOCAL;
            order.n_stages = s->pp;
            order.k = ks[j];
            order.budget = 8;
            order.timing = &timing;
            order.bytes = token_bytes(s, w);
            for (r = 0; most > 0 && r < (order.kind == CF_SCHEDULE_BEST ? sizeof rungs / sizeof rungs[0] : 1); r++) {
                int64_t held;
                if (r > 0) order.limit_bytes = (int64_t)(rungs[r] * (double)most);
                held = run(s, plan, &order, w, out);
                if (r == 0) most = held;
                if (held < 0) break;
            }
        }
}

/* The fastest within `bytes`; NULL: none is. */
static const outcome *fastest(const outcomes *all, int64_t bytes) {
    const outcome *found = NULL;
    int64_t i;
    for (i = 0; i < all->n; i++)
        if (all->of[i].bytes <= bytes && (!found || all->of[i].seconds < found->seconds)) found = &all->of[i];
    return found;
}

static double behind(const outcomes *all, const outcome *o) {
    const outcome *other = fastest(all, o->bytes);
    return other ? 100 * (other->seconds / o->seconds - 1) : 9999;
}

/* The schedule with offload that gains most on the streamed one, and then that which gains most on all ways. */
static void compare(const setup *s, const cf_plan *plan, double link) {
    static const way stays = {0, 0}, leaves = {1, 0}, streams = {0, 1};
    static outcomes stay, offload, stream, mixed;
    double gain, most[2] = {-1e300, -1e300};
    int64_t i, at[2] = {0, 0}, j;
    way part = {0, 0};
    stay.n = offload.n = stream.n = mixed.n = 0;
    run_all(s, plan, link, &stays, &stay);
    run_all(s, plan, link, &leaves, &offload);
    run_all(s, plan, link, &streams, &stream);
    for (part.part = .25; part.part < 1; part.part += .25) run_all(s, plan, link, &part, &mixed);
    for (i = 0; i < offload.n; i++) {
        const outcome *o = &offload.of[i];
        double of[3] = {behind(&stream, o), behind(&mixed, o), behind(&stay, o)};
        if (of[2] <= 1) continue; /* it fits as it is */
        gain = of[0];
        if (gain > most[0]) most[0] = gain, at[0] = i;
        for (j = 1; j < 3; j++)
            if (of[j] < gain) gain = of[j];
        if (gain > most[1]) most[1] = gain, at[1] = i;
    }
    for (j = 0; j < 2; j++) {
        const outcome *o = &offload.of[at[j]];
        if (most[j] <= 1) printf("   -\n");
        else
            printf("%s %-5s %d %6.2f %8.3f %+8.1f %% %+8.1f %% %+8.1f %%\n", j ? "*" : " ",
                   cf_schedule_kind_name(o->kind), (int)o->k, (double)o->bytes / (1 << 30), o->seconds,
                   behind(&stream, o), behind(&mixed, o), behind(&stay, o));
        if (j == 0) printf("%51s", "");
    }
}

static void compare_all(const setup *s, const int64_t *lengths, int64_t n, int64_t context, int64_t n_long) {
    static const int64_t chunk_sizes[] = {1024, 2048, 8192};
    static const double links[] = {8e9, 12e9, 25e9, 55e9};
    size_t c, l;
    for (c = 0; c < sizeof chunk_sizes / sizeof chunk_sizes[0]; c++) {
        cf_pack_desc pack = {0};
        cf_plan *plan = NULL;
        cf_error error;
        pack.chunk_size = chunk_sizes[c];
        if (cf_pack(lengths, n, &pack, &plan, &error) != CF_OK) give_up(&error);
        for (l = 0; l < sizeof links / sizeof links[0]; l++) {
            printf("%-10s tp %d pp %d %4dK x %d chunk %dK %2.0f GB/s", s->model.name, (int)s->tp, (int)s->pp,
                   (int)(context / 1024), (int)n_long, (int)(chunk_sizes[c] / 1024), links[l] / 1e9);
            compare(s, plan, links[l]);
            fflush(stdout);
        }
        cf_plan_free(plan);
    }
}

static int64_t read_short(const char *path, int64_t *lengths) {
    FILE *file = fopen(path, "r");
    char line[256];
    int64_t n = 0;
    while (file && n < SHORT && fgets(line, sizeof line, file)) {
        long length = strtol(line, NULL, 10);
        if (length > 0 && length < 16384) lengths[n++] = length;
    }
    if (file) fclose(file);
    return n;
}

int main(int argc, char **argv) {
    static const int64_t contexts[] = {32768, 131072, 262144, 1048576}, counts[] = {1, 2, 4};
    static const cf_model llama2 = {"llama2-7b", 32, 4096, 32, 32, 128, 11008, 32000, 0, 0, 0, 0, 0, 0};
    static const int64_t pps[] = {1, 4};
    int64_t lengths[MOST_LENGTHS], n = argc > 1 ? read_short(argv[1], lengths) : 0, i, j, l, m;
    if (n < SHORT) return 2;
    for (i = 0; i < 4; i++) {
        setup s = {i / 2 ? *cf_model_find("qwen2.5-7b") : llama2, 4, pps[i % 2]};
        for (j = 0; j < 4; j++)
            for (l = 0; l < 3; l++) {
                if (contexts[j] > 262144 && counts[l] > 1) continue;
                for (m = 0; m < counts[l]; m++) lengths[SHORT + m] = contexts[j];
                compare_all(&s, lengths, SHORT + counts[l], contexts[j], counts[l]);
            }
    }
    return 0;
}
