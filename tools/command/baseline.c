/* baseline.c - training without chunks: 1F1B that splits no sequence. */

#include "baseline.h"

#include <string.h>

enum { FORMS = 2 }; /* a micro-batch a sequence; packed */

/* Returns the least ChunkSize that splits nothing. */
static int64_t whole_chunk_size(const int64_t *lengths, int64_t n, int64_t align, const baseline_rule *rule) {
    int64_t longest = rule && rule->longest > 0 ? rule->longest : 1, i;

    for (i = 0; i < n; i++)
        if (lengths[i] > longest) longest = lengths[i];
    if (align > 1 && longest % align != 0 && longest < INT64_MAX - align) longest += align - longest % align;
    return longest;
}

static int64_t most_slices(int packed, int64_t asked) { return packed ? asked : 1; }

void baseline_words(const baseline_tuned *base, char *text, size_t size) {
    size_t n;

    snprintf(text, size, "%s", baseline_name(base->packed));
    n = strlen(text);
    if (base->context > 0)
        snprintf(text + n, size - n, ", with context parallelism of %lld (%s)", (long long)base->context,
                 base->ring ? "ring" : "all-gather");
}

const char *baseline_name(int packed) {
    return packed ? "1F1B on unsplit sequences, packed" : "1F1B on unsplit sequences";
}

/* ----------------------------------------------------------------------------------------------------------------
   One batch
   ---------------------------------------------------------------------------------------------------------------- */

static cf_result pack_whole(const packing *list, const packing_options *asked, int packed, const baseline_rule *rule,
                            cf_plan **plan, cf_error *error) {
    cf_pack_desc desc;

    memset(&desc, 0, sizeof desc);
    desc.chunk_size = whole_chunk_size(list->lengths, list->list.n_sequences, asked->align, rule);
    desc.align = asked->align > 0 ? asked->align : 1;
    desc.max_slices = most_slices(packed, asked->max_slices);
    desc.n_ranks = asked->ranks;
    desc.lockstep = asked->lockstep || asked->max_cp > 1;
    return cf_pack(list->lengths, list->list.n_sequences, &desc, plan, error);
}

cf_result baseline_make(const pipeline *p, const packing *list, const packing_options *asked, int packed,
                        const baseline_rule *rule, baseline *out, cf_error *error) {
    baseline fresh;
    int64_t level;
    int done = 0;
    pipeline away = *p;
    cf_result result;

    memset(&fresh, 0, sizeof fresh);
    fresh.packed = packed;
    fresh.what.kind = CF_SCHEDULE_1F1B;
    fresh.what.unlimited = 1;
    result = pack_whole(list, asked, packed, rule, &fresh.plan, error);
    level = rule && rule->recompute > CF_RECOMPUTE_NONE ? rule->recompute : CF_RECOMPUTE_NONE;
    for (; result == CF_OK && !done; level++) {
        if (level == CF_RECOMPUTE_SELECTIVE) continue; /* frees next to nothing */
        if (level == CF_RECOMPUTE_COUNT) away.memory.offload |= CF_OFFLOAD_CHECKPOINTS;
        if (p->estimates && level < CF_RECOMPUTE_COUNT) fresh.what.recompute = (cf_recompute)level;
        fresh.offload = away.memory.offload;
        pipeline_run_free(&fresh.run);
        result = pipeline_run_make(&away, fresh.plan, &fresh.what, &fresh.run, error);
        if (result == CF_OK) done = pipeline_fits(p, &fresh.run) || level == CF_RECOMPUTE_COUNT;
    }
    if (result == CF_OK) *out = fresh;
    else baseline_free(&fresh);
    return result;
}

static int is_better(const pipeline *p, const pipeline_run *a, const pipeline_run *b) {
    int fits = pipeline_fits(p, a);

    if (fits != pipeline_fits(p, b)) return fits;
    if (!fits) return a->memory[a->fullest].total < b->memory[b->fullest].total;
    return a->timeline->makespan < b->timeline->makespan;
}

cf_result baseline_find(const pipeline *p, const packing *list, const packing_options *asked,
                        const baseline_rule *rule, baseline *out, cf_error *error) {
    baseline forms[FORMS];
    int packed, found = -1;
    cf_result result = CF_OK;

    memset(forms, 0, sizeof forms);
    for (packed = 0; packed < FORMS && result != CF_ERROR_MEMORY; packed++) {
        cf_result made = baseline_make(p, list, asked, packed, rule, &forms[packed], error);
        if (made != CF_OK) result = made;
        else if (found < 0 || is_better(p, &forms[packed].run, &forms[found].run)) found = packed;
    }
    if (result == CF_ERROR_MEMORY) found = -1; /* memory ran out, so the form found may not be the better one */
    for (packed = 0; packed < FORMS; packed++)
        if (packed != found) baseline_free(&forms[packed]);
    if (found < 0) return result;
    *out = forms[found];
    return CF_OK;
}

void baseline_free(baseline *b) {
    pipeline_run_free(&b->run);
    cf_plan_free(b->plan);
    memset(b, 0, sizeof *b);
}

/* ----------------------------------------------------------------------------------------------------------------
   The batches of a search
   ---------------------------------------------------------------------------------------------------------------- */

static void note_least(baseline_tuned *base, int64_t bytes) {
    if (bytes > 0 && (base->least == 0 || bytes < base->least)) base->least = bytes;
}

void baseline_take_times(baseline_tuned *base, const cf_tuning *tuning) {
    int64_t n = tuning->n_batches;

    base->best = tuning->candidates[tuning->winner];
    memcpy(base->seconds, &tuning->seconds[tuning->winner * n], (size_t)n * sizeof *base->seconds);
}

static void note_form(const cf_tuning *tuning, int packed, baseline_tuned *base) {
    const cf_tune_candidate *c;

    if (tuning->winner < 0) {
        note_least(base, tuning->smallest_limit);
        return;
    }
    c = &tuning->candidates[tuning->winner];
    if (base->best.status == CF_TUNE_OK && !(c->seconds < base->best.seconds)) return;
    baseline_take_times(base, tuning);
    base->split = tuning->splits[c->split];
    base->split.recompute = c->recompute;
    base->packed = packed;
}

int64_t baseline_chunk_size(const int64_t *lengths, int64_t n, const cf_tune_desc *desc) {
    baseline_rule rule = {desc->context, CF_RECOMPUTE_DEFAULT};

    return whole_chunk_size(lengths, n, desc->pack.align, &rule);
}

void baseline_take_form(cf_tune_desc *desc, int packed, const int64_t *chunk_size) {
    static const int64_t k = 1;
    static const cf_schedule_kind kind = CF_SCHEDULE_1F1B;
    static const cf_replay replay = CF_REPLAY_LOCAL;

    desc->pack.max_slices = most_slices(packed, desc->pack.max_slices);
    if (desc->pack.shared_prefixes) desc->pack.min_shared_prefix = INT64_MAX; /* the same batches, without shared
                                                                                 prefixes */
    desc->pack.max_cp = 0;
    desc->chunk_sizes = chunk_size;
    desc->ks = &k;
    desc->kinds = &kind;
    desc->replays = &replay;
    desc->tolerance = -1; /* the fastest, so that more choices never make the baseline slower */
    desc->n_chunk_sizes = desc->n_ks = desc->n_kinds = desc->n_replays = desc->n_exact = 1;
    desc->no_stream = desc->memory.state_window == 0;
    desc->no_outputs = 1;
    desc->memory.outputs = 0; /* nothing is replayed */
    desc->split_backward = 0;
}

/* Searches one form of the baseline with one level of recomputation. */
static cf_result tune_form(const int64_t *lengths, int64_t n, cf_tune_desc desc, int packed, cf_recompute level,
                           int offload, baseline_tuned *base, cf_error *error) {
    int64_t chunk_size = baseline_chunk_size(lengths, n, &desc);
    cf_tuning *tuning = NULL;
    cf_result result;

    if (desc.parallel.n_virtual > 1) desc.parallel.layers = NULL;
    desc.parallel.n_virtual = 1;
    desc.parallel.placement = CF_PLACEMENT_DEFAULT;
    desc.parallel.recompute = level;
    desc.parallel.recompute_layers = 0;
    desc.memory.offload |= offload;
    baseline_take_form(&desc, packed, &chunk_size);
    result = cf_tune(lengths, n, &desc, &tuning, error);
    if (result == CF_OK) note_form(tuning, packed, base);
    else memcpy(base->why, error->text, sizeof base->why);
    cf_tuning_free(tuning);
    return result == CF_ERROR_MEMORY ? result : CF_OK;
}

/* Another split may fit with less recomputation and still be slower, so all levels are tried. */
cf_result baseline_tune(const int64_t *lengths, int64_t n, const cf_tune_desc *desc, baseline_tuned *out,
                        cf_error *error) {
    cf_result result = CF_OK;
    int level, packed, offload;

    memset(out, 0, sizeof *out);
    for (level = CF_RECOMPUTE_NONE; level <= CF_RECOMPUTE_COUNT; level++) {
        offload = level == CF_RECOMPUTE_COUNT ? CF_OFFLOAD_CHECKPOINTS : 0;
        /* measured costs are valid for one level only */
        if (desc->timing && level != (int)desc->parallel.recompute) continue;
        if (level == CF_RECOMPUTE_SELECTIVE && !desc->timing) continue;       /* frees next to nothing */
        for (packed = 0; packed < FORMS && result == CF_OK; packed++)
            result = tune_form(lengths, n, *desc, packed, offload ? CF_RECOMPUTE_FULL : (cf_recompute)level, offload,
                               out, error);
    }
    return result;
}

void baseline_print_recipe(const baseline_tuned *recipe, double best) {
    double seconds = recipe->best.seconds;

    if (recipe->best.status != CF_TUNE_OK && recipe->least == 0) return;
    fputs("FSDP recipe       ZeRO 3, full recomputation, checkpoints in host memory", stdout);
    if (recipe->best.status != CF_TUNE_OK) {
        printf(": does not fit, it needs %.2f GiB at least\n", modelling_gib(recipe->least));
        return;
    }
    printf(", context %s: estimated %s s, %.2f GiB,\n                  %.2f GiB in host memory for each GPU",
           cli_commas(recipe->context > 0 ? recipe->context : 1), pipeline_estimate(seconds),
           modelling_gib(recipe->best.bytes), modelling_gib(recipe->best.memory.host));
    if (best > 0) printf("; chunks are %s that", pipeline_pace(best, seconds));
    putchar('\n');
}

void baseline_write(json_writer *w, const char *key, const baseline_tuned *base) {
    json_open(w, key, '{');
    json_bool_member(w, "fits", base->best.status == CF_TUNE_OK);
    if (base->best.status != CF_TUNE_OK) {
        json_integer_member(w, "bytes", base->least);
        if (base->why[0]) json_text_member(w, "why", base->why);
    } else {
        json_bool_member(w, "packed", base->packed);
        json_integer_member(w, "context_parallel", base->context > 0 ? base->context : 1);
        if (base->context > 0) json_text_member(w, "exchange", base->ring ? "ring" : "all-gather");
        json_text_member(w, "recompute", cf_recompute_name(base->split.recompute));
        json_integer_member(w, "offload", base->best.offload);
        json_integer_member(w, "host_bytes", base->best.memory.host);
        modelling_write_split(w, &base->split);
        json_number_member(w, "seconds", base->best.seconds);
        json_number_member(w, "confidence", base->best.confidence);
        json_number_member(w, "bubble_useful", base->best.bubble);
        json_integer_member(w, "bytes", base->best.bytes);
        json_integer_member(w, "stage", base->best.stage);
    }
    json_close(w, '}');
}
