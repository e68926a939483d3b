/* bench_baseline.c - compares the default schedule with training of the same batches without chunks.

       make build/bench_baseline && build/bench_baseline [own] [FILE]

   Qwen2.5-7B on 16 H100, as tensor 4 x pipeline 4 and as tensor 2 x pipeline 8. The loss is computed a few rows at a
   time, because the logits of a long sequence would not fit. Five kinds of batches, 12 of each: chat (lengths like
   those of LMSys-Chat-1M), the same with one sequence of 256K, the lengths of FILE in their order (left out without
   FILE), log-normal, and code (long answers: uniform between 1K and 12K).

   The baseline is the fastest form of 1f1b that splits no sequence: a micro-batch is a sequence, or several packed to
   the longest, with the recomputation that it needs to fit into the GPU. Ours is a cf_schedule_desc of zeros except
   n_stages. ChunkSize and recomputation are the first in cf_tune's ranking, for K = 1 and the baseline's bytes, with
   which this call itself keeps to these bytes. A setting ranked before it is printed in brackets. Both are chosen for
   the 12 batches together, as for a data set; with `own`, for each batch by itself.

   A line for each batch has the seconds of the pipeline (without the optimizer's step) and the bytes of the fullest
   GPU. Ratios are ours over the baseline's; "timed" is the same call with the timing. The exit status is 1 if ours is
   slower in any case, and the reasons are printed. */

#define CHUNKFLOW_IMPLEMENTATION
#include "../command/cli.h"

#define CHUNKFLOW_TUNE_IMPLEMENTATION
#include "../chunkflow_tune.h"

#include "../command/draw.h"
#include "../command/packing.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

enum { BATCHES = 12, BATCH = 256, MOST = BATCHES * BATCH };

static void must(cf_result result, const cf_error *error) {
    if (result == CF_OK) return;
    fprintf(stderr, "bench_baseline: %s\n", error->text);
    exit(2);
}

static const char MODEL[] = "qwen2.5-7b", GPU[] = "h100-80g";

/* ---- batches ---- */

typedef enum kind_id { CHAT, CHAT_LONG, LISTED, LOG_NORMAL, CODE, KINDS } kind_id;

typedef struct kind {
    const char *name;
    int64_t batch; /* sequences of one */
} kind;

static const kind kinds[KINDS] = {
    {"chat", 256}, {"chat + 256K", 256}, {"file", 64}, {"log-normal", 96}, {"code", 128}};

static int64_t draw_length(kind_id id, int64_t i, draw_source *source) {
    int64_t length;
    switch (id) {
        case LOG_NORMAL: return draw_lognormal(source, 4096, 1300000) + 1;
        case CODE: return 1024 + (int64_t)draw_below(source, 11265);
        default:
            if (id == CHAT_LONG && i % BATCH == 0) return 262144;
            do length = draw_lmsys(source);
            while (length > 262144);
            return length;
    }
}

/* Draws all batches of a kind, one after the other. Returns 0 if they should come from a file, and there is none. */
static int draw_batches(kind_id id, const char *path, int64_t *lengths) {
    int64_t n = BATCHES * kinds[id].batch, i;
    draw_source source;
    source.state = (uint64_t)id + 1;
    if (id == LISTED) {
        cli_list list;
        int64_t *own;
        if (path == NULL) return 0;
        if (cli_list_read(path, CLI_MAX_SEQUENCES, &list) != CLI_OK) exit(2);
        own = cli_list_lengths(&list);
        if (own == NULL || list.n_sequences == 0) exit(2);
        for (i = 0; i < n; i++) lengths[i] = own[i % list.n_sequences];
        free(own);
        cli_list_free(&list);
        return 1;
    }
    for (i = 0; i < n; i++) lengths[i] = draw_length(id, i, &source);
    return 1;
}

/* ---- one batch, one way ---- */

typedef struct way {
    cf_parallel parallel;
    cf_pack_desc pack;
    cf_schedule_desc order;
    int told; /* 1: the schedule is made with the timing */
} way;

typedef struct outcome {
    double seconds;
    int64_t bytes, chunks;
    int replays;
} outcome;

static outcome run_way(const way *w, const int64_t *lengths, int64_t n) {
    cf_stage_cost stages[16];
    cf_memory_report reports[16];
    cf_timing timing;
    cf_cost_desc cost;
    cf_memory_desc memory;
    cf_simulate_desc simulate;
    cf_schedule_desc order = w->order;
    cf_plan *plan = NULL;
    cf_schedule *schedule = NULL;
    cf_timeline *timeline = NULL;
    cf_error error;
    outcome out;
    int64_t s;
    memset(&cost, 0, sizeof cost);
    memset(&memory, 0, sizeof memory);
    memset(&simulate, 0, sizeof simulate);
    memset(&out, 0, sizeof out);
    cost.model = memory.model = cf_model_find(MODEL);
    cost.gpu = cf_gpu_find(GPU);
    cost.parallel = memory.parallel = w->parallel;
    memory.loss = CF_LOSS_CHUNKED;
    cost.chunk_size = w->pack.chunk_size;
    must(cf_cost_estimate(&cost, stages, w->parallel.pp, &timing, NULL, &error), &error);
    order.shape.n_stages = w->parallel.pp;
    order.timing = w->told ? &timing : NULL;
    simulate.timing = &timing;
    simulate.no_bounds = 1;
    must(cf_pack(lengths, n, &w->pack, &plan, &error), &error);
    must(cf_schedule_make(plan, &order, &schedule, &error), &error);
    must(cf_simulate(plan, schedule, &simulate, &timeline, &error), &error);
    must(cf_schedule_memory(&memory, plan, schedule, reports, w->parallel.pp, NULL, &error), &error);
    out.seconds = timeline->makespan;
    out.chunks = plan->n_chunks;
    out.replays = timeline->replayed > 0;
    for (s = 0; s < w->parallel.pp; s++)
        if (reports[s].total > out.bytes) out.bytes = reports[s].total;
    cf_timeline_free(timeline);
    cf_schedule_free(schedule);
    cf_plan_free(plan);
    return out;
}

/* Batches of one kind with the same set-up. */
typedef struct batches {
    const int64_t *lengths;
    int64_t n, size; /* how many, and sequences of each */
} batches;

/* Runs all batches. Returns the seconds of all together, and fills in one outcome for each. *bytes: the largest. */
static double run_all(const way *w, const batches *of, outcome *out, int64_t *bytes) {
    double seconds = 0;
    int64_t b;
    *bytes = 0;
    for (b = 0; b < of->n; b++) {
        out[b] = run_way(w, &of->lengths[b * of->size], of->size);
        seconds += out[b].seconds;
        if (out[b].bytes > *bytes) *bytes = out[b].bytes;
    }
    return seconds;
}

/* ---- the two ways ---- */

static int64_t longest_of(const int64_t *lengths, int64_t n) {
    int64_t longest = 0, i;
    for (i = 0; i < n; i++)
        if (lengths[i] > longest) longest = lengths[i];
    return longest;
}

/* Returns 0 if the baseline does not fit with any recomputation; *bytes is then the least that it needs. */
static int find_base(const batches *of, const cf_parallel *parallel, way *w, outcome *out, int64_t *bytes) {
    int64_t memory = cf_gpu_find(GPU)->memory, least = INT64_MAX;
    double best = DBL_MAX;
    int level, single;
    for (level = CF_RECOMPUTE_NONE; level < CF_RECOMPUTE_COUNT; level++)
        for (single = 0; single < 2; single++) {
            outcome found[BATCHES];
            int64_t most;
            double seconds;
            way trial;
            memset(&trial, 0, sizeof trial);
            trial.parallel = *parallel;
            trial.parallel.recompute = (cf_recompute)level;
            trial.pack.chunk_size = longest_of(of->lengths, of->n * of->size);
            trial.pack.max_slices = single;
            trial.order.kind = CF_SCHEDULE_1F1B;
            trial.order.limits.chunks = CF_NO_LIMIT;
            trial.told = 1;
            seconds = run_all(&trial, of, found, &most);
            if (most < least) least = most;
            if (most > memory || seconds >= best) continue;
            best = seconds;
            *w = trial;
            *bytes = most;
            memcpy(out, found, (size_t)of->n * sizeof *out);
        }
    if (best >= DBL_MAX) *bytes = least;
    return best < DBL_MAX;
}

static cf_tune_desc tune_desc(const batches *of, const cf_parallel *parallel, int64_t limit_bytes) {
    static const int64_t k = 1;
    static const cf_schedule_kind best = CF_SCHEDULE_BEST;
    static const cf_replay local = CF_REPLAY_LOCAL;
    cf_tune_desc desc;
    memset(&desc, 0, sizeof desc);
    desc.model = cf_model_find(MODEL);
    desc.gpu = cf_gpu_find(GPU);
    desc.parallel = *parallel;
    desc.memory.loss = CF_LOSS_CHUNKED;
    desc.limit_bytes = limit_bytes;
    desc.batch = of->size;
    desc.n_batches = of->n;
    desc.ks = &k;
    desc.kinds = &best;
    desc.replays = &local;
    desc.n_ks = desc.n_kinds = desc.n_replays = 1;
    desc.no_stream = 1;
    return desc;
}

/* A setting that was ranked before ours, but takes more bytes. */
typedef struct passed_over {
    way way;
    double ranked, seconds; /* seconds by cf_tune, of one batch; seconds of all batches */
    int64_t bytes;
} passed_over;

/* Returns 0 if cf_tune has no setting with which the default call keeps to these bytes. */
static int find_ours(const batches *of, const cf_parallel *parallel, int64_t limit_bytes, way *w, outcome *out,
                     passed_over *over) {
    cf_tune_desc desc = tune_desc(of, parallel, limit_bytes);
    double best = DBL_MAX;
    int level;
    over->ranked = DBL_MAX;
    for (level = CF_RECOMPUTE_NONE; level < CF_RECOMPUTE_COUNT; level++) {
        cf_tuning *tuning = NULL;
        cf_error error;
        int64_t i;
        desc.parallel.recompute = (cf_recompute)level;
        if (cf_tune(of->lengths, of->n * of->size, &desc, &tuning, &error) != CF_OK) continue; /* room for nothing */
        for (i = 0; i < tuning->n_ranked; i++) {
            const cf_tune_candidate *c = &tuning->candidates[tuning->ranking[i]];
            outcome found[BATCHES];
            int64_t most;
            double seconds;
            way trial;
            if (c->seconds >= best) break;
            memset(&trial, 0, sizeof trial);
            trial.parallel = tuning->splits[0];
            trial.pack.chunk_size = c->chunk_size;
            seconds = run_all(&trial, of, found, &most);
            if (most > limit_bytes && c->seconds < over->ranked) {
                over->way = trial;
                over->ranked = c->seconds;
                over->seconds = seconds;
                over->bytes = most;
            }
            if (most > limit_bytes) continue;
            best = c->seconds;
            *w = trial;
            memcpy(out, found, (size_t)of->n * sizeof *out);
            break;
        }
        cf_tuning_free(tuning);
    }
    if (over->ranked >= best) over->ranked = DBL_MAX;
    return best < DBL_MAX;
}

/* ---- tables ---- */

typedef struct sums {
    double ratio, told; /* of logarithms */
    double worst;
    int64_t n, n_compared, n_slower;
} sums;

static double gib(int64_t bytes) { return (double)bytes / 1073741824.0; }

static void print_way(const char *name, const way *w) {
    printf("  %-9s recompute %s, ", name, cf_recompute_name(w->parallel.recompute));
    if (w->pack.max_slices == 1) puts("a micro-batch a sequence");
    else printf("at most %s tokens at a time\n", cli_commas(w->pack.chunk_size));
}

/* Prints a line that compares a setting ranked before ours with the baseline. Returns whether it is no slower. */
static int print_passed_over(const passed_over *over, const outcome *theirs, int64_t n, int64_t bytes) {
    double seconds = 0;
    int64_t b;
    if (over->ranked >= DBL_MAX) return 0;
    for (b = 0; b < n; b++) seconds += theirs[b].seconds;
    print_way("(before:", &over->way);
    printf("            takes %.4f x the baseline's time, but %.4f x its bytes)\n", over->seconds / seconds,
           (double)over->bytes / (double)bytes);
    return over->seconds <= seconds;
}

static void compare_batch(const way *ours, const int64_t *lengths, int64_t n, const outcome *theirs, const outcome *own,
                          int passed, sums *sum) {
    way with_timing = *ours;
    double ratio = own->seconds / theirs->seconds, told;
    const char *why = packing_why_unsplit(longest_of(lengths, n), ours->pack.chunk_size, (double)own->chunks,
                                          ours->parallel.pp, own->replays);
    with_timing.told = 1;
    told = run_way(&with_timing, lengths, n).seconds / theirs->seconds;
    sum->ratio += log(ratio);
    sum->told += log(told);
    sum->n_compared++;
    sum->n_slower += ratio > 1;
    if (ratio > sum->worst) sum->worst = ratio;
    printf("  %2lld %9s %9.4f %8.2f %7lld %9.4f %8.2f %8.4f %8.4f\n", (long long)sum->n_compared,
           cli_commas(longest_of(lengths, n)), theirs->seconds, gib(theirs->bytes), (long long)own->chunks,
           own->seconds, gib(own->bytes), ratio, told);
    if (told <= 1) why = "the schedule knows no costs; with the timing it is not";
    else if (passed) why = "the setting in brackets would not be, but takes more memory";
    if (ratio > 1) printf("     slower: %s\n", why);
}

static void compare_set(const batches *of, const cf_parallel *parallel, sums *sum) {
    outcome theirs[BATCHES], own[BATCHES];
    int64_t bytes = 0, b;
    passed_over over;
    way base, ours;
    int passed;
    sum->n += of->n;
    if (!find_base(of, parallel, &base, theirs, &bytes)) {
        printf("  the baseline does not fit: with full recomputation it needs %.2f GiB\n", gib(bytes));
        return;
    }
    print_way("baseline", &base);
    if (!find_ours(of, parallel, bytes, &ours, own, &over)) {
        printf("  no ChunkSize keeps the default call within %.2f GiB\n", gib(bytes));
        sum->n_slower += of->n;
        return;
    }
    print_way("ours", &ours);
    passed = print_passed_over(&over, theirs, of->n, bytes);
    printf("  %2s %9s %9s %8s %7s %9s %8s %8s %8s\n", "", "longest", "baseline", "GiB", "chunks", "ours s", "GiB",
           "ratio", "timed");
    for (b = 0; b < of->n; b++)
        compare_batch(&ours, &of->lengths[b * of->size], of->size, &theirs[b], &own[b], passed, sum);
}

static sums compare_kind(const kind *k, const cf_parallel *parallel, const int64_t *lengths, int own) {
    batches of;
    sums sum;
    int64_t b;
    memset(&sum, 0, sizeof sum);
    of.n = own ? 1 : BATCHES;
    of.size = k->batch;
    printf("\n%s, batches of %lld sequences, tensor %lld x pipeline %lld\n", k->name, (long long)k->batch,
           (long long)parallel->tp, (long long)parallel->pp);
    for (b = 0; b < BATCHES; b += of.n) {
        of.lengths = &lengths[b * k->batch];
        compare_set(&of, parallel, &sum);
    }
    fflush(stdout);
    return sum;
}

static void print_sums(const kind *k, int64_t pp, const sums *s) {
    double n = (double)s->n_compared;
    printf("%-14s %8lld %8lld %8lld", k->name, (long long)pp, (long long)s->n, (long long)s->n_compared);
    if (n > 0) printf(" %8.4f %8.4f %8.4f", exp(s->ratio / n), s->worst, exp(s->told / n));
    else printf(" %8s %8s %8s", "-", "-", "-");
    printf(" %8lld\n", (long long)s->n_slower);
}

int main(int argc, char **argv) {
    static const int64_t splits[][2] = {{4, 4}, {2, 8}};
    static int64_t lengths[MOST];
    int own = argc > 1 && strcmp(argv[1], "own") == 0, bad = 0;
    const char *path = argc > 1 + own ? argv[1 + own] : NULL;
    sums all[KINDS][2];
    int64_t id, i;
    memset(all, 0, sizeof all);
    for (i = 0; i < 2; i++)
        for (id = 0; id < KINDS; id++) {
            cf_parallel parallel;
            memset(&parallel, 0, sizeof parallel);
            parallel.tp = splits[i][0];
            parallel.pp = splits[i][1];
            if (draw_batches((kind_id)id, path, lengths))
                all[id][i] = compare_kind(&kinds[id], &parallel, lengths, own);
        }
    printf("\nours / baseline, geometric means; timed: the schedule was told the timing\n");
    printf("%-14s %8s %8s %8s %8s %8s %8s %8s\n", "kind", "pipeline", "batches", "compared", "ratio", "worst", "timed",
           "slower");
    for (id = 0; id < KINDS; id++)
        for (i = 0; i < 2; i++) {
            if (all[id][i].n == 0) continue;
            print_sums(&kinds[id], splits[i][1], &all[id][i]);
            bad |= all[id][i].n_slower > 0;
        }
    return bad;
}
