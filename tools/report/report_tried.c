/* report_tried.c - changes that would improve the best schedule of a report: other options, tried one after another. */

#include "report.h"

#include <string.h>

enum {
    MOST_PASSES = 20000, /* largest number of passes of a schedule that is made several more times */
    MOST_STAGES = 16     /* largest number of stages whose layers are listed */
};

/* A smaller gain is not worth a change of options: the next try leaves it out. */
static const double worth = 0.01;

/* The options settled so far, and the one that is tried in addition. */
typedef struct trial {
    report *r;
    const packing_options *asked;
    packing packed;           /* with another ChunkSize; empty while the report's is the best */
    const cf_plan *plan;
    pipeline pipe;
    pipeline_case what;
    pipeline_run run;         /* its schedule; none while the report's is the best */
    int64_t layers[MOST_STAGES];
    char options[192];
    double makespan;
    int code; /* CLI_FAILED once memory has run out: nothing more is tried then */
} trial;

/* Skips an impossible change. If memory ran out, tries end instead, since the change could have paid. */
static int cannot_try(trial *t, const cf_error *error) {
    if (error->code == CF_ERROR_MEMORY) t->code = cli_error(error, NULL);
    return 0;
}

/* Makes the schedule of a plan with `pipe` and `what`; the next line of the report has the result. Keeps it if it
   pays. */
static int try_change(trial *t, const cf_plan *plan, const pipeline *pipe, const pipeline_case *what,
                      const char *option) {
    report_try *line = &t->r->tries[t->r->n_tries];
    pipeline_run run;
    cf_error error;

    if (t->r->n_tries == REPORT_MOST_TRIES || t->code != CLI_OK) return 0;
    if (pipeline_run_make(pipe, plan, what, &run, &error) != CF_OK) return cannot_try(t, &error);
    t->r->n_tries++;
    snprintf(line->options, sizeof line->options, "%.90s%s%.96s", t->options, t->options[0] ? " " : "",
             option);
    line->makespan = pipeline_makespan(&run);
    line->memory = run.memory[run.fullest].total;
    line->fits = pipeline_fits(pipe, &run);
    line->pays = line->fits && line->makespan < (1 - worth) * t->makespan;
    if (!line->pays) {
        pipeline_run_free(&run);
        return 0;
    }
    pipeline_run_free(&t->run);
    t->pipe = *pipe;
    t->what = *what;
    t->run = run;
    t->makespan = line->makespan;
    memcpy(t->options, line->options, sizeof t->options);
    return 1;
}

/* Tries to keep all chunks of a chain, or repeatedly half as many until they fit. */
static void try_k(trial *t) {
    cf_plan_stats stats;
    int64_t k;

    cf_plan_measure(t->plan, NULL, &stats);
    for (k = stats.longest_chain; k > t->what.k; k /= 2) {
        pipeline_case what = t->what;
        char option[32];
        what.k = k;
        snprintf(option, sizeof option, "--k %lld", (long long)k);
        if (try_change(t, t->plan, &t->pipe, &what, option) || t->r->n_tries == 0 ||
            t->r->tries[t->r->n_tries - 1].fits)
            return;
    }
}

/* Tries to keep as many chunks as fit into the GPU's memory. A given limit stays. */
static void try_limit(trial *t) {
    pipeline pipe = t->pipe;

    if (pipe.limits || pipe.limit != 0) return;
    pipe.limit = CF_NO_LIMIT;
    (void)try_change(t, t->plan, &pipe, &t->what, "--limit none");
}

/* Tries to train without recomputation. */
static void try_recompute(trial *t) {
    pipeline pipe = t->pipe;

    if (pipe.model.parallel.recompute <= CF_RECOMPUTE_NONE) return;
    pipe.model.parallel.recompute = CF_RECOMPUTE_NONE;
    (void)try_change(t, t->plan, &pipe, &t->what, "--recompute none");
}

static void try_virtual(trial *t) {
    pipeline_case what = t->what;

    if (t->pipe.n_stages < 2 || t->what.n_virtual > 1 || t->what.kind != CF_SCHEDULE_BEST || t->pipe.limits ||
        t->plan->order || t->pipe.model.layers || t->pipe.model.model.layers < 2 * t->pipe.n_stages)
        return;
    what.n_virtual = 2;
    (void)try_change(t, t->plan, &t->pipe, &what, "--virtual 2");
}

/* Tries half and twice the ChunkSize. With several ranks each would get other chunks, so one rank would show
   nothing. */
static void try_chunk_size(trial *t, int64_t size) {
    packing_options asked = *t->asked;
    char option[48];
    packing packed;

    if (t->plan->n_ranks > 1 || size < 1 || size > CF_MAX_CHUNK_SIZE || t->code != CLI_OK) return;
    if (t->asked->align > 1 && size % t->asked->align != 0) return;
    asked.chunk_size = size;
    t->code = packing_of_lengths(&asked, t->r->packed->list.path, t->r->packed->lengths,
                                 t->r->packed->shares, t->r->packed->list.n_sequences, &packed);
    if (t->code != CLI_OK) return;
    if (size % 1024 == 0) snprintf(option, sizeof option, "--chunk-size %lldK", (long long)size / 1024);
    else snprintf(option, sizeof option, "--chunk-size %lld", (long long)size);
    if (!try_change(t, packed.plan, &t->pipe, &t->what, option)) {
        packing_free(&packed);
        return;
    }
    packing_free(&t->packed);
    t->packed = packed;
    t->plan = t->packed.plan;
}

/* ---- layers ---- */

/* Finds the layers of each stage, and the work of one: the least over all stages, because some stages also have the
   embedding or the head. Returns 0 if it is not known. */
static double layer_work(const pipeline *pipe, const double *work, int64_t *own) {
    double least = 0;
    int64_t i;

    for (i = 0; i < pipe->n_stages; i++) {
        cf_shard shard;
        if (cf_stage_shard(&pipe->model.model, &pipe->model.parallel, i, -1, &shard, NULL) != CF_OK || shard.layers < 1)
            return 0;
        own[i] = shard.layers;
        if (i == 0 || work[i] / (double)own[i] < least) least = work[i] / (double)own[i];
    }
    return least;
}

/* Distributes the layers one by one, each to the stage with least work so far. fixed: work besides the layers. */
static double even_out(int64_t n, int64_t layers, double layer, double *fixed, int64_t *own) {
    double most = 0;
    int64_t i, given;

    for (i = 0; i < n; i++) {
        fixed[i] += layer; /* each has one */
        own[i] = 1;
    }
    for (given = n; given < layers; given++) {
        int64_t least = 0;
        for (i = 1; i < n; i++)
            if (fixed[i] < fixed[least]) least = i;
        fixed[least] += layer;
        own[least]++;
    }
    for (i = 0; i < n; i++)
        if (fixed[i] > most) most = fixed[i];
    return most;
}

/* Fills in t->layers. Returns 0 if even stages would not be faster. */
static int find_layers(trial *t) {
    const cf_plan *plan = t->plan;
    const pipeline_run *run = t->run.timeline ? &t->run : &t->r->runs[t->r->best];
    double work[MOST_STAGES], most = 0, layer;
    int64_t i, n = t->pipe.n_stages;
    idle_report idle;
    cf_error error;

    if (idle_make(plan, run->schedule, run->timeline, NULL, &idle, &error) != CF_OK) return cannot_try(t, &error);
    for (i = 0; i < n; i++) {
        int cause;
        work[i] = run->timeline->makespan;
        for (cause = 0; cause < IDLE_CAUSE_COUNT; cause++) work[i] -= idle.stages[i].seconds[cause];
        if (work[i] > most) most = work[i];
    }
    idle_free(&idle);
    layer = layer_work(&t->pipe, work, t->layers);
    if (!(layer > 0)) return 0;
    for (i = 0; i < n; i++) work[i] -= (double)t->layers[i] * layer;
    return even_out(n, t->pipe.model.model.layers, layer, work, t->layers) < (1 - worth) * most;
}

static void try_layers(trial *t) {
    pipeline pipe = t->pipe;
    char option[80] = "--stage-layers ";
    int64_t i;

    if (pipe.n_stages < 2 || pipe.n_stages > MOST_STAGES || t->what.n_virtual > 1 || t->code != CLI_OK ||
        !find_layers(t))
        return;
    for (i = 0; i < pipe.n_stages; i++)
        snprintf(option + strlen(option), sizeof option - strlen(option), "%s%lld", i > 0 ? "," : "",
                 (long long)t->layers[i]);
    pipe.model.parallel.layers = t->layers;
    (void)try_change(t, t->plan, &pipe, &t->what, option);
}

/* ---- all of it ---- */

int report_try_changes(report *r, const pipeline_case *what, const packing_options *asked) {
    trial t;

    if (r->best < 0 || !r->pipe->estimates || r->schedules[r->best].schedule->n_actions > MOST_PASSES) return CLI_OK;
    memset(&t, 0, sizeof t);
    t.r = r;
    t.asked = asked;
    t.plan = r->packed->plan;
    t.pipe = *r->pipe;
    t.what = *what;
    if (what->split_backward) snprintf(t.options, sizeof t.options, "--split-backward");
    t.makespan = report_seconds(r, &r->schedules[r->best]);
    try_chunk_size(&t, 2 * asked->chunk_size);
    if (t.plan == r->packed->plan) try_chunk_size(&t, asked->chunk_size / 2);
    try_recompute(&t);
    try_k(&t);
    try_limit(&t);
    try_virtual(&t);
    try_layers(&t);
    pipeline_run_free(&t.run);
    packing_free(&t.packed);
    return t.code;
}
