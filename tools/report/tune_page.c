/* tune_page.c - the result of a search as JSON, and as a page with a report of the winner. */

#include "report.h"
#include "tune.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

/* ----------------------------------------------------------------------------------------------------------------
   Words
   ---------------------------------------------------------------------------------------------------------------- */

static const char *gib_text(int64_t bytes) {
    char *text = cli_scratch();
    snprintf(text, CLI_SCRATCH_BYTES, "%.2f GiB", modelling_gib(bytes));
    return text;
}

double tune_ratio(const tune_outcome *o, double *confidence) {
    const cf_tuning *tuning = o->tuning;
    double scaled[CF_MAX_TUNE_BATCHES], ratio, seconds;
    int64_t i, n = tuning->n_batches;

    *confidence = 0;
    if (tuning->winner < 0 || o->base.best.status != CF_TUNE_OK) return 0;
    seconds = tuning->candidates[tuning->winner].seconds;
    ratio = o->base.best.seconds / seconds;
    for (i = 0; i < n; i++) scaled[i] = ratio * tuning->seconds[tuning->winner * n + i];
    if (n > 2) *confidence = cf_tune_confidence(o->base.seconds, scaled, n) / seconds;
    return ratio;
}

/* Says how fast chunks are beside whole sequences, and whether the batches are enough to know it. half: of the ratio's
   interval. */
static void say_ratio(const tune_outcome *o, double ratio, double half, char *text, size_t size) {
    double gap = ratio < 1 ? 1 / ratio - 1 : ratio - 1, off = ratio < 1 ? half / (ratio * ratio) : half, needed;
    const char *pay = ratio < 1 ? "chunks do not pay here" : "chunks pay here";
    size_t n;

    if (gap <= off && off > 0.01) pay = "not decided whether chunks pay here";
    if (gap < 0.01 && off <= 0.01)
        snprintf(text, size, "chunks and whole sequences take the same time here, within 1 %%");
    else snprintf(text, size, "%s: %s whole sequences", pay, pipeline_pace(1, ratio));
    n = strlen(text);
    if (off > 0)
        snprintf(text + n, size - n, ", +- %.2g%s over %s batches", ratio < 1 ? 100 * off : off, ratio < 1 ? " %" : "",
                 cli_commas(o->tuning->n_batches));
    n = strlen(text);
    snprintf(text + n, size - n, " (%s and %s s)", pipeline_estimate(o->tuning->candidates[o->tuning->winner].seconds),
             pipeline_estimate(o->base.best.seconds));
    n = strlen(text);
    if (pay[0] != 'n') return;
    needed = off / (gap > 0.01 ? gap : 0.01);
    needed = ceil(2 * (double)o->tuning->n_batches * needed * needed); /* twice: the interval varies, too */
    snprintf(text + n, size - n, "; about --batches %.0f would decide",
             needed < CF_MAX_TUNE_BATCHES ? needed : CF_MAX_TUNE_BATCHES);
}

void tune_say_verdict(const tune_outcome *o, char *text, size_t size) {
    double seconds = o->tuning->candidates[o->tuning->winner].seconds, half, ratio = tune_ratio(o, &half);

    if (ratio > 0) say_ratio(o, ratio, half, text, size);
    else if (o->offload > 0 && o->away.best.status == CF_TUNE_OK)
        snprintf(text, size, "whole sequences fit only with --offload %s (%s s; chunks take %s s without)",
                 o->offload > 1 ? "parameters" : "optimizer", pipeline_estimate(o->away.best.seconds),
                 pipeline_estimate(seconds));
    else snprintf(text, size, o->base.least > 0 ? "only chunks fit here" : "chunks were compared with nothing");
}

void tune_say_share(const tune_outcome *o, char *text, size_t size) {
    const cf_tuning *tuning = o->tuning;
    int64_t i, j, half = tune_longest(o->job) / 2, with = 0;

    for (i = 0; i < tuning->n_batches; i++) {
        for (j = 0; j < tuning->batch && tuning->batches[i * tuning->batch + j] <= half; j++) continue;
        with += j < tuning->batch;
    }
    text[0] = '\0';
    if (with < tuning->n_batches)
        snprintf(text, size, "sequences of more than %s tokens, half the longest, are in %s of the %s batches",
                 cli_commas(half), cli_commas(with), cli_commas(tuning->n_batches));
}

/* Says what the baseline is, or why there is none. */
static void say_baseline(const baseline_tuned *base, char *text, size_t size) {
    const cf_tune_candidate *b = &base->best;
    char words[128];

    baseline_words(base, words, sizeof words);
    if (b->status != CF_TUNE_OK && base->least > 0)
        snprintf(text, size, "; %s does not fit: it needs %s at least", baseline_name(0), gib_text(base->least));
    else if (b->status != CF_TUNE_OK) snprintf(text, size, "; %s cannot be timed", baseline_name(0));
    else
        snprintf(text, size, "; %s takes %s s (recompute %s, %s)", words, pipeline_estimate(b->seconds),
                 cf_recompute_name(base->split.recompute), gib_text(b->bytes));
}

void tune_say_reason(const cf_tuning *tuning, const char *line, char *text, size_t size) {
    const cf_tune_candidate *c = &tuning->candidates[tuning->winner];
    const cf_tune_candidate *fastest = &tuning->candidates[tuning->ranking[0]];
    int64_t place = 0;
    char gain[48] = "because it is simpler to run";

    text[0] = '\0';
    if (c == fastest) return;
    while (tuning->ranking[place] != tuning->winner) place++;
    if (c->bytes < fastest->bytes)
        snprintf(gain, sizeof gain, "for %.2f GiB less", modelling_gib(fastest->bytes - c->bytes));
    snprintf(text, size, "%schosen %s: place %s by time,%s%.2f %% (+- %.2f) slower than the fastest, which takes "
                         "%s s and %.2f GiB",
             line, gain, cli_commas(place + 1), line, 100 * c->behind / fastest->seconds,
             100 * c->behind_confidence / fastest->seconds, pipeline_estimate(fastest->seconds),
             modelling_gib(fastest->bytes));
}

/* Writes whether chunks pay off, the result in one sentence and, if the winner is not the fastest, the reason in
   another. */
static void say_outcome(const tune_outcome *o, char *text, size_t size) {
    const cf_tuning *tuning = o->tuning;
    const cf_tune_candidate *c;
    char verdict[256], share[128], base[256], reason[256];
    size_t n;

    if (tuning->winner < 0) {
        if (tuning->interrupted) snprintf(text, size, "The search was interrupted before anything was known.");
        else
            snprintf(text, size, "Nothing fits into %s: the least that any of these needs is %s.",
                     gib_text(tuning->limit_bytes), gib_text(tuning->smallest_limit));
        return;
    }
    c = &tuning->candidates[tuning->winner];
    tune_say_verdict(o, verdict, sizeof verdict);
    tune_say_share(o, share, sizeof share);
    say_baseline(&o->base, base, sizeof base);
    snprintf(text, size, "%c%s. ChunkSize %s with K = %s takes an estimated %s s an iteration and %s of the %s that a "
                         "GPU may hold%s%s.",
             verdict[0] - 'a' + 'A', verdict + 1, cli_commas(c->chunk_size), cli_commas(c->k),
             pipeline_estimate(c->seconds), gib_text(c->bytes), gib_text(tuning->limit_bytes), base,
             tuning->interrupted ? "; the search was interrupted, so there may be better ones" : "");
    tune_say_reason(tuning, " ", reason, sizeof reason);
    n = strlen(text);
    if (reason[0]) snprintf(text + n, size - n, " This setting is%s.", reason);
    n = strlen(text);
    if (share[0]) snprintf(text + n, size - n, " S%s.", share + 1);
}

/* Returns the term that breaks the limit, as the name of a member of cf_memory_report. Constant terms come first; if
   these fit, it is the largest of the others. */
static const char *breaking_term(const cf_memory_report *m, int64_t limit) {
    int fixed = m->parameters + m->gradients + m->optimizer + m->runtime > limit, is_fixed = 0;
    const char *found = "";
    int64_t most = -1;

#define LARGER_TERM(name, words)                                                                                \
    is_fixed = &m->name == &m->parameters || &m->name == &m->gradients || &m->name == &m->optimizer ||          \
               &m->name == &m->runtime;                                                                         \
    if (is_fixed == fixed && m->name > most) {                                                                  \
        most = m->name;                                                                                         \
        found = #name;                                                                                          \
    }
    CF_MEMORY_TERMS(LARGER_TERM)
#undef LARGER_TERM
    return found;
}

const char *tune_outputs_word(const cf_tune_candidate *c) {
    if (c->outputs == 0) return "-";
    return c->outputs > 1 || c->state_window > 0 ? "host" : "gpu";
}

const char *tune_state_word(const cf_tune_candidate *c) {
    return c->state_window > 0 ? "streams" : "stays";
}

/* ----------------------------------------------------------------------------------------------------------------
   JSON
   ---------------------------------------------------------------------------------------------------------------- */

static void write_terms_of(json_writer *w, const cf_memory_report *memory) {
    json_open(w, "memory", '{');
    modelling_write_terms(w, memory);
    json_close(w, '}');
}

static void write_times(json_writer *w, const char *key, const double *seconds, int64_t n) {
    int64_t i;

    json_open(w, key, '[');
    for (i = 0; i < n; i++) json_number_member(w, NULL, seconds[i]);
    json_close(w, ']');
}

static void write_exact(json_writer *w, const cf_tuning *tuning, int64_t id, int with_batches) {
    const cf_tune_candidate *c = &tuning->candidates[id];

    json_integer_member(w, "limited", c->limited);
    json_integer_member(w, "in_step", c->in_step);
    json_number_member(w, "seconds", c->seconds);
    json_number_member(w, "confidence", c->confidence);
    json_number_member(w, "behind", c->behind);
    json_number_member(w, "behind_confidence", c->behind_confidence);
    json_number_member(w, "bubble_useful", c->bubble);
    json_number_member(w, "stream_waiting", c->waiting);
    json_integer_member(w, "host_bytes", c->memory.host);
    json_number_member(w, "chunks", c->chunks);
    json_integer_member(w, "bytes", c->bytes);
    json_integer_member(w, "stage", c->stage);
    write_terms_of(w, &c->memory);
    if (with_batches) write_times(w, "batches", &tuning->seconds[id * tuning->n_batches], tuning->n_batches);
}

static void write_choice(json_writer *w, const cf_tune_candidate *c) {
    json_integer_member(w, "chunk_size", c->chunk_size);
    json_integer_member(w, "k", c->k);
    json_text_member(w, "schedule", cf_schedule_kind_name(c->kind));
    json_text_member(w, "replay", cf_replay_name(c->replay));
    json_integer_member(w, "outputs", c->outputs);
    json_integer_member(w, "offload", c->offload);
    json_text_member(w, "recompute", cf_recompute_name(c->recompute));
    json_integer_member(w, "recompute_layers", c->recompute_layers);
    json_integer_member(w, "state_window", c->state_window);
}

static void write_candidate(json_writer *w, const cf_tuning *tuning, int64_t id, int with_batches) {
    const cf_tune_candidate *c = &tuning->candidates[id];

    json_open(w, NULL, '{');
    json_integer_member(w, "id", id);
    json_integer_member(w, "split", c->split);
    write_choice(w, c);
    json_text_member(w, "status", cf_tune_status_name(c->status));
    if (c->why[0]) json_text_member(w, "why", c->why);
    if (c->same_as >= 0) json_integer_member(w, "same_as", c->same_as);
    json_number_member(w, "bound", c->bound);
    if (c->estimate > 0) json_number_member(w, "estimate", c->estimate);
    if (c->status == CF_TUNE_INFEASIBLE) {
        json_integer_member(w, "bytes", c->bytes);
        json_integer_member(w, "stage", c->stage);
        json_text_member(w, "breaks", breaking_term(&c->memory, tuning->limit_bytes));
        write_terms_of(w, &c->memory);
    }
    if (c->status == CF_TUNE_OK) write_exact(w, tuning, id, with_batches);
    json_close(w, '}');
}

static void write_setting(json_writer *w, const tune_outcome *o) {
    const cf_tuning *tuning = o->tuning;
    const tune_job *job = o->job;
    double confidence;
    char text[1280];

    say_outcome(o, text, sizeof text);
    json_text_member(w, "sentence", text);
    json_number_member(w, "ratio", tune_ratio(o, &confidence));
    json_number_member(w, "ratio_confidence", confidence);
    if (o->base.best.status == CF_TUNE_OK) write_times(w, "baseline_batches", o->base.seconds, tuning->n_batches);
    json_text_member(w, "source", cli_base_name(job->list.path));
    json_text_member(w, "model", job->model.model.name);
    json_text_member(w, "gpu", job->gpu.name);
    json_integer_member(w, "seed", job->asked->seed);
    json_integer_member(w, "sequences", job->n);
    json_integer_member(w, "left_out", job->left_out);
    json_integer_member(w, "left_out_tokens", job->left_out_tokens);
    json_integer_member(w, "batch", tuning->batch);
    json_integer_member(w, "limit_bytes", tuning->limit_bytes);
    json_integer_member(w, "smallest_limit", tuning->smallest_limit);
    json_integer_member(w, "simulated", tuning->n_simulated);
    json_integer_member(w, "interrupted", tuning->interrupted);
    json_integer_member(w, "winner", tuning->winner);
    json_integers_member(w, "ranking", tuning->ranking, tuning->n_ranked);
    json_integers_member(w, "batch_tokens", tuning->batch_tokens, tuning->n_batches);
    report_write_term_names(w);
    baseline_write(w, "baseline", &o->base);
    if (o->recipe.best.status == CF_TUNE_OK || o->recipe.least > 0) baseline_write(w, "fsdp_recipe", &o->recipe);
}

static void write_split(json_writer *w, const char *key, const cf_tuning *tuning, int64_t split) {
    json_open(w, key, '{');
    modelling_write_split(w, &tuning->splits[split]);
    if (tuning->max_cps[split] > 0) json_integer_member(w, "max_cp", tuning->max_cps[split]);
    json_close(w, '}');
}

static void write_frontier(json_writer *w, const tune_outcome *o) {
    const cf_tuning *tuning = o->tuning;
    tune_trade next = {NULL, NULL, 0, INT64_MAX, 0};
    int64_t i;

    json_open(w, "frontier", '[');
    while (tuning->winner >= 0 && (next = tune_fastest_below(o, next.bytes)).tuning) {
        json_open(w, NULL, '{');
        if (next.tuning == tuning) json_integer_member(w, "id", next.c - tuning->candidates);
        write_split(w, "split", next.tuning, next.c->split);
        write_choice(w, next.c);
        json_number_member(w, "seconds", next.seconds);
        json_integer_member(w, "about", next.about);
        json_integer_member(w, "bytes", next.bytes);
        json_close(w, '}');
    }
    json_close(w, ']');
    json_list_open(w, "best_of_splits");
    for (i = 0; i < tuning->n_splits; i++) json_list_integer(w, tune_best_of_split(tuning, i));
    json_list_close(w);
}

static void write_splits(json_writer *w, const cf_tuning *tuning) {
    int64_t i;

    json_open(w, "splits", '[');
    for (i = 0; i < tuning->n_splits; i++) {
        write_split(w, NULL, tuning, i);
    }
    json_close(w, ']');
}

static void write_map(json_writer *w, const tune_map *map) {
    int64_t i;

    json_integers_member(w, "chunk_sizes", map->chunk_sizes, map->n_chunk_sizes);
    json_integers_member(w, "ks", map->ks, map->n_ks);
    json_open(w, "cells", '[');
    for (i = 0; i < map->n_chunk_sizes * map->n_ks; i++) {
        const tune_cell *cell = &map->cells[i];
        json_open(w, NULL, '{');
        json_integer_member(w, "chunk_size", cell->chunk_size);
        json_integer_member(w, "k", cell->k);
        json_integer_member(w, "candidate", cell->candidate);
        json_integer_member(w, "numbers", cell->numbers);
        if (cell->nearest >= 0) json_integer_member(w, "nearest", cell->nearest);
        json_close(w, '}');
    }
    json_close(w, ']');
}

/* Writes a result. shown: the candidates to write (n_candidates), without the times of single batches. NULL: all, with
   these times. */
static void write_outcome(const tune_outcome *o, const char *shown, cli_output *to) {
    json_writer w;
    int64_t i;

    json_write_begin(&w, to, "chunkflow-tuning");
    write_setting(&w, o);
    write_splits(&w, o->tuning);
    write_frontier(&w, o);
    write_map(&w, &o->map);
    if (shown) {
        json_integer_member(&w, "n_candidates", o->tuning->n_candidates);
        json_integer_member(&w, "show", o->job->asked->show);
    }
    json_open(&w, "candidates", '[');
    for (i = 0; i < o->tuning->n_candidates; i++)
        if (!shown || shown[i]) write_candidate(&w, o->tuning, i, !shown);
    json_close(&w, ']');
    json_write_end(&w);
}

void tune_write_json(const tune_outcome *o, cli_output *to) { write_outcome(o, NULL, to); }

/* ----------------------------------------------------------------------------------------------------------------
   A report of the winner
   ---------------------------------------------------------------------------------------------------------------- */

typedef struct winner {
    const tune_outcome *outcome;
    const cf_tune_candidate *candidate;
    packing_options packing;
    pipeline_options pipeline;
    packing packed;
    pipeline pipe;
    report out;
} winner;

/* Makes the schedule that the search has made for this batch, for a rank. */
static cf_result make_run(const winner *w, const pipeline *rank, pipeline_run *out, cf_error *error) {
    const tune_outcome *o = w->outcome;
    cf_schedule *schedule = NULL;
    cf_result result = cf_tune_schedule(&o->job->desc, o->tuning, o->tuning->winner, w->packed.plan, rank->rank,
                                        &schedule, error);

    if (result == CF_OK) result = pipeline_run_of(rank, w->packed.plan, schedule, out, error);
    if (result == CF_OK) out->schedule = schedule;
    else cf_schedule_free(schedule);
    return result;
}

/* A report_rank_fn. */
static cf_result make_rank(void *user, const pipeline *rank, pipeline_run *out) {
    cf_error error;

    return make_run((const winner *)user, rank, out, &error);
}

/* Opens the winner, with the search's costs and memory: its split, and its GPU with the limit of its memory. */
static int open_winner(winner *w, int64_t batch) {
    const cf_tuning *tuning = w->outcome->tuning;
    const tune_job *job = w->outcome->job;
    const cf_parallel *split = &tuning->splits[w->candidate->split];
    int code;

    w->packing.chunk_size = w->candidate->chunk_size;
    w->packing.no_tails = job->asked->no_tails;
    w->packing.align = job->asked->align;
    w->packing.ranks = split->dp;
    w->packing.max_cp = w->candidate->max_cp;
    w->packing.lockstep = w->candidate->in_step;
    w->pipeline.stages = split->pp;
    w->pipeline.limit = "none"; /* a GPU limits bytes, not chunks */
    w->pipeline.model = job->asked->modelling;
    w->pipeline.model.tp = split->tp;
    w->pipeline.gpu = job->asked->gpu;
    w->pipeline.costs = job->asked->costs;
    if (job->asked->costs) w->pipeline.gpu.name = NULL;
    w->pipeline.reserve = job->asked->limit > 0 ? 0 : job->asked->reserve;
    w->pipeline.terms = job->asked->terms;
    w->pipeline.max_tries = job->asked->max_tries;
    code = pipeline_open("tune", &w->pipeline, split->dp, &w->pipe);
    if (code != CLI_OK) return code;
    w->pipe.model.parallel = tune_split(tuning, w->candidate);
    w->pipe.gpu_bytes = tuning->limit_bytes;
    w->pipe.memory.state_window = w->candidate->state_window;
    w->pipe.memory.outputs = w->candidate->outputs;
    w->pipe.memory.offload = w->candidate->offload;
    code = pipeline_price_cp(&w->pipe, &w->packing);
    if (code != CLI_OK) return code;
    code = packing_of_lengths(&w->packing, job->list.path, &tuning->batches[batch * tuning->batch],
                              tuning->shared_prefixes ? &tuning->shared_prefixes[batch * tuning->batch] : NULL,
                              tuning->batch, &w->packed);
    if (code == CLI_OK) pipeline_take_cp(&w->pipe, w->packed.plan);
    return code;
}

/* Adds the baseline of the search, on this batch and in this split. If it does not fit the batch with the longest
   sequence, other batches have no baseline either. */
static int add_baseline(winner *w) {
    const tune_job *job = w->outcome->job;
    const baseline_tuned *base = &w->outcome->base;
    const cf_parallel *split = &w->pipe.model.parallel;
    baseline_rule rule;
    char verdict[256];

    if (base->best.status != CF_TUNE_OK && base->least == 0) {
        snprintf(w->out.no_baseline, sizeof w->out.no_baseline, "it cannot be timed: %.200s", base->why);
        return CLI_OK;
    }
    if (base->best.status != CF_TUNE_OK) {
        tune_say_verdict(w->outcome, verdict, sizeof verdict);
        snprintf(w->out.no_baseline, sizeof w->out.no_baseline,
                 "%s needs %s at least for the longest sequence of all; %.128s", baseline_name(0),
                 gib_text(base->least), verdict);
        return CLI_OK;
    }
    memset(&rule, 0, sizeof rule);
    rule.longest = tune_longest(job) > job->asked->context ? tune_longest(job) : job->asked->context;
    if (base->split.tp == split->tp && base->split.pp == split->pp && base->split.dp == split->dp)
        rule.recompute = base->split.recompute;
    return report_add_baseline(&w->out, &w->packing, &rule);
}

static int add_paper(winner *w) {
    pipeline_case paper;

    if (w->candidate->kind == CF_SCHEDULE_PAPER) return CLI_OK;
    memset(&paper, 0, sizeof paper);
    paper.kind = CF_SCHEDULE_PAPER;
    paper.replay = w->candidate->replay;
    paper.k = w->candidate->k;
    return report_add_case(&w->out, "paper", &paper);
}

static int fill_winner(winner *w, int64_t batch) {
    report *r = &w->out;
    pipeline_run run;
    cf_error error;
    char name[48];
    int code;

    report_start(r, &w->packed, &w->pipe, w->candidate->k);
    snprintf(r->part, sizeof r->part, "batch %lld of %lld, drawn with seed %lld", (long long)batch,
             (long long)w->outcome->tuning->n_batches, (long long)w->outcome->job->asked->seed);
    w->pipe.every_rank = 1;
    code = add_baseline(w);
    if (code == CLI_OK) code = report_add_ranks(r, &w->pipe, cf_schedule_kind_name(w->candidate->kind), make_rank, w);
    if (code == CLI_OK) code = add_paper(w);
    if (code != CLI_OK) return code;
    if (make_run(w, &w->pipe, &run, &error) != CF_OK)
        return cli_failed("the best schedule cannot be made again: %s", error.text);
    r->best = r->n_schedules;
    snprintf(name, sizeof name, "tuned: %s", cf_schedule_kind_name(w->candidate->kind));
    return report_add_run(r, name, w->packed.plan, run.schedule, &run, CF_RECOMPUTE_DEFAULT, NULL);
}

static void free_winner(winner *w) {
    report_free(&w->out);
    packing_free(&w->packed);
    pipeline_close(&w->pipe);
}

/* ----------------------------------------------------------------------------------------------------------------
   The page
   ---------------------------------------------------------------------------------------------------------------- */

/* Marks the candidates that the page mentions. It may leave out tens of thousands. */
static char *mark_shown(const tune_outcome *o) {
    const cf_tuning *tuning = o->tuning;
    char *shown = (char *)calloc((size_t)tuning->n_candidates, 1);
    int64_t i;

    if (!shown) return NULL;
    for (i = 0; i < o->map.n_chunk_sizes * o->map.n_ks; i++)
        shown[o->map.cells[i].candidate] = shown[o->map.cells[i].numbers] = 1;
    for (i = 0; i < tuning->n_ranked; i++)
        if (i < o->job->asked->show) shown[tuning->ranking[i]] = 1;
    for (i = 0; i < tuning->n_splits; i++)
        if (tune_best_of_split(tuning, i) >= 0) shown[tune_best_of_split(tuning, i)] = 1;
    if (tuning->winner >= 0) shown[tuning->winner] = 1;
    return shown;
}

typedef struct shown_part {
    const tune_outcome *outcome;
    char *shown; /* (n_candidates) */
} shown_part;

/* A report_data. */
static void write_shown(const void *of, cli_output *to) {
    const shown_part *part = (const shown_part *)of;
    write_outcome(part->outcome, part->shown, to);
}

static void write_report(const void *of, cli_output *to) { report_write_json((const report *)of, to); }

static int make_winner(const tune_outcome *o, winner *w) {
    int64_t batch = tune_usual_batch(o->tuning);
    int code;

    w->outcome = o;
    w->candidate = &o->tuning->candidates[o->tuning->winner];
    code = open_winner(w, batch);
    return code == CLI_OK ? fill_winner(w, batch) : code;
}

int tune_write_page(const tune_outcome *o, cli_output *to) {
    report_data parts[REPORT_PAGE_PARTS] = {{0}};
    shown_part part;
    winner w;
    int code = CLI_OK;

    memset(&w, 0, sizeof w);
    part.outcome = o;
    part.shown = mark_shown(o);
    if (!part.shown) return cli_failed("out of memory");
    parts[REPORT_PAGE_TUNING].write = write_shown;
    parts[REPORT_PAGE_TUNING].of = &part;
    if (o->tuning->winner >= 0) {
        code = make_winner(o, &w);
        parts[REPORT_PAGE_REPORT].write = write_report;
        parts[REPORT_PAGE_REPORT].of = &w.out;
    }
    if (code == CLI_OK) report_write_page(parts, to);
    free_winner(&w);
    free(part.shown);
    return code;
}
