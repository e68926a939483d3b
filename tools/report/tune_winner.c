/* tune_winner.c - the use of a search's winner: commands, settings for a trainer, one of its batches. */

#include "tune.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

int64_t tune_longest(const tune_job *job) {
    int64_t longest = 1, i;

    for (i = 0; i < job->n; i++)
        if (job->lengths[i] > longest) longest = job->lengths[i];
    return longest;
}

cf_parallel tune_split(const cf_tuning *tuning, const cf_tune_candidate *c) {
    cf_parallel split = tuning->splits[c->split];

    split.recompute = c->recompute;
    split.recompute_layers = c->recompute_layers;
    return split;
}

double tune_slower_seconds(const cf_tuning *tuning, const cf_tune_candidate *c) {
    if (c->estimate > 0) return c->estimate;
    return tuning->n_ranked == 0 || c->bound > tuning->candidates[tuning->ranking[0]].seconds ? c->bound : 0;
}

const char *tune_slower_words(const cf_tuning *tuning, const cf_tune_candidate *c) {
    double seconds = tune_slower_seconds(tuning, c);
    char *text = cli_scratch();

    if (!(seconds > 0)) return "slower, as others like it are";
    snprintf(text, CLI_SCRATCH_BYTES, c->estimate > 0 ? "about %s s, by first batches" : "no faster than %s s",
             pipeline_estimate(seconds));
    return text;
}

/* Ranks the knowledge about a candidate, best first: 0 its exact time, 1 an estimate, 2 a bound, 3 that it is slower, 4
   the memory that it needs, 5 nothing, or only another's numbers. */
static int rank_of(const cf_tuning *tuning, const cf_tune_candidate *c) {
    if (c->status == CF_TUNE_OK) return 0;
    if (c->status == CF_TUNE_INFEASIBLE) return 4;
    if (c->status == CF_TUNE_UNTRIED || c->same_as >= 0) return 5;
    return c->estimate > 0 ? 1 : tune_slower_seconds(tuning, c) > 0 ? 2 : 3;
}

int64_t tune_best_of_split(const cf_tuning *tuning, int64_t split) {
    int64_t i, best = -1;
    double least = 0;
    int least_rank = 5;

    for (i = 0; i < tuning->n_candidates; i++) {
        const cf_tune_candidate *c = &tuning->candidates[i];
        int rank = rank_of(tuning, c);
        double value = rank == 0 ? c->seconds : rank == 4 ? (double)c->bytes : tune_slower_seconds(tuning, c);
        if (c->split != split || rank > least_rank || rank == 5 || (rank == least_rank && value >= least)) continue;
        best = i;
        least = value;
        least_rank = rank;
    }
    return best;
}

/* Returns the work of a batch. Its trees are in order, so a sequence's shared prefix is the one that it shares with the
   previous sequence. */
tune_work tune_work_of(const cf_tuning *tuning, int shared) {
    tune_work work = {0, 0};
    double n_batches = (double)tuning->n_batches;
    int64_t i;

    for (i = 0; i < tuning->n_batches * tuning->batch; i++) {
        double length = (double)tuning->batches[i];
        double common = shared && tuning->shared_prefixes ? (double)tuning->shared_prefixes[i].tokens : 0;
        work.tokens += (length - common) / n_batches;
        work.pairs += (length * (length + 1) - common * (common + 1)) / 2 / n_batches;
    }
    return work;
}

double tune_utilisation(const tune_job *job, const cf_tuning *tuning, double seconds, double gpus) {
    modelling_flops flops = modelling_flops_of(&job->model.model);
    tune_work work = tune_work_of(tuning, 1);

    return (flops.per_token * work.tokens + flops.per_pair * work.pairs) / seconds / gpus / job->gpu.flops;
}

int64_t tune_usual_batch(const cf_tuning *tuning) {
    const double *seconds = &tuning->seconds[(tuning->winner < 0 ? 0 : tuning->winner) * tuning->n_batches];
    double mean = tuning->winner < 0 ? 0 : tuning->candidates[tuning->winner].seconds;
    int64_t i, found = 0;

    for (i = 1; i < tuning->n_batches && tuning->winner >= 0; i++)
        if (fabs(seconds[i] - mean) < fabs(seconds[found] - mean)) found = i;
    return found;
}

static void write_number(const char *before, int64_t number, cli_output *to) {
    char text[32];

    (void)cli_write(before, strlen(before), to);
    (void)cli_write(text, (size_t)snprintf(text, sizeof text, "%lld", (long long)number), to);
}

/* Writes sequences first .. end - 1, which begin alike, in a list's form: `32K + (2K + 1K)`. tokens: length of the
   common beginning that the caller has already written, left out here. */
static void write_tree(const int64_t *lengths, const cf_shared_prefix *shares, int64_t first, int64_t end,
                       int64_t tokens,
                       cli_output *to) {
    int64_t common = lengths[first], i, next;

    for (i = first + 1; i < end; i++)
        if (shares[i].tokens < common) common = shares[i].tokens;
    write_number("", common - tokens, to);
    for (i = first; i < end && end - first > 1; i = next) {
        for (next = i + 1; next < end && shares[next].tokens > common; next++) continue;
        (void)cli_write(" + ", 3, to);
        if (next - i > 1) (void)cli_write("(", 1, to);
        write_tree(lengths, shares, i, next, common, to);
        if (next - i > 1) (void)cli_write(")", 1, to);
    }
}

void tune_write_batch(const cf_tuning *tuning, cli_output *to) {
    int64_t first = tune_usual_batch(tuning) * tuning->batch, i, next;
    const int64_t *lengths = &tuning->batches[first];
    const cf_shared_prefix *shares = tuning->shared_prefixes ? &tuning->shared_prefixes[first] : NULL;

    for (i = 0; i < tuning->batch; i = next) {
        for (next = i + 1; shares && next < tuning->batch && shares[next].tokens > 0; next++) continue;
        write_tree(lengths, shares, i, next, 0, to);
        (void)cli_write("\n", 1, to);
    }
}

/* ----------------------------------------------------------------------------------------------------------------
   Commands
   ---------------------------------------------------------------------------------------------------------------- */

/* Options of `tune` that `plan` and `memory` also have, with the same meaning. Options chosen by the search are added
   separately. */
static const char *const shared[] = {
    "--model", "--config", "--layers", "--hidden", "--heads", "--kv-heads", "--head-dim", "--ffn", "--vocab", "--tied",
    "--qkv-bias", "--qk-norm", "--no-gate", "--mtp", "--imbalance", "--no-sp", "--stage-layers", "--gpu",
    "--gpus-per-node", "--launch", "--loss", "--unfused", "--state-gradient", "--optimizer", "--lora",
    "--lora-experts", "--offload", "--offload-checkpoints", "--runtime", "--fragmentation", "--no-tails", "--align",
    "--split-backward", "--virtual", "--placement", "--costs"};

static int is_shared(const char *name) {
    size_t i;

    for (i = 0; i < sizeof shared / sizeof shared[0]; i++)
        if (strcmp(shared[i], name) == 0) return 1;
    return 0;
}

/* Prints a word that a shell reads unchanged. */
static void print_word(const char *word) {
    static const char plain[] = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789_-+=./:,@";

    if (word[0] && strspn(word, plain) == strlen(word)) {
        printf(" %s", word);
        return;
    }
    fputs(" '", stdout);
    for (; *word; word++)
        if (*word == '\'') fputs("'\\''", stdout);
        else cli_put((const char[]){*word, '\0'}, stdout);
    putchar('\'');
}

static void print_choice(const char *words, int64_t choice) {
    for (; choice > 1 && strchr(words, '|'); choice--) words = strchr(words, '|') + 1;
    printf(" %.*s", (int)strcspn(words, "|"), words);
}

/* Prints an option as it was given, if it was. */
static void print_given(const cli_option *option, const void *asked, const void *defaults) {
    const char *own = (const char *)asked + option->offset, *usual = (const char *)defaults + option->offset;
    size_t bytes = option->kind == CLI_FLAG ? sizeof(int) : option->kind == CLI_TEXT ? sizeof(char *) : sizeof(int64_t);
    const char *text;
    int64_t number;

    if (option->kind == CLI_REALS || memcmp(own, usual, bytes) == 0) return;
    printf(" %s", option->name);
    if (option->kind == CLI_TEXT) {
        memcpy(&text, own, sizeof text);
        print_word(text);
    } else if (option->kind != CLI_FLAG) {
        memcpy(&number, own, sizeof number);
        if (option->kind == CLI_CHOICE) print_choice(option->value, number);
        else if (option->kind == CLI_MILLIONTHS) printf(" %.6f", (double)number / 1e6);
        else printf(" %lld", (long long)number);
    }
}

/* Returns whether an option describes a GPU, which a file of costs replaces. */
static int is_of_gpu(const char *name) { return strncmp(name, "--gpu", 5) == 0 || strcmp(name, "--launch") == 0; }

static void print_shared(const tune_job *job, const cli_option *options, const void *defaults) {
    for (; options->name; options++)
        if (is_shared(options->name) && !(job->asked->costs && is_of_gpu(options->name)))
            print_given(options, job->asked, defaults);
}

/* Returns the bytes of --stream for a candidate that streams. */
static int64_t ring_bytes(const tune_job *job, const cf_tuning *tuning, const cf_tune_candidate *c) {
    cf_memory_desc desc = job->desc.memory;

    desc.model = job->desc.model;
    desc.parallel = tuning->splits[c->split];
    return c->state_window > 0 ? c->state_window * modelling_row_bytes(&desc) : 0;
}

/* Returns the search's options of packing, with its costs for cp groups. */
static cf_pack_desc pack_with_cp_groups(const tune_job *job, const cf_tune_candidate *c, const cf_parallel *split) {
    cf_cost_desc cost = modelling_costs(&job->model, &job->gpu, &job->asked->gpu, c->chunk_size);
    cf_stage_cost *stages = (cf_stage_cost *)malloc((size_t)split->pp * sizeof *stages);
    cf_pack_desc pack = job->desc.pack;
    cf_timing timing;

    pack.max_cp = c->max_cp;
    cost.parallel = *split;
    cost.parallel.recompute = c->recompute;
    cost.parallel.recompute_layers = c->recompute_layers;
    cost.stream = c->state_window > 0;
    cost.max_cp = c->max_cp;
    cost.unfused = job->desc.memory.unfused;
    cost.outputs = c->outputs;
    cost.offload = c->offload;
    if (stages && c->max_cp > 0 && cf_cost_estimate(&cost, stages, split->pp, &timing, NULL, NULL) == CF_OK)
        cf_cp_costs(&timing, &pack);
    free(stages);
    return pack;
}

/* Returns the number of tries that the search spent on such a schedule of the usual batch; other batches hardly
   differ. */
static int64_t tries_of(const tune_job *job, const cf_tuning *tuning, const cf_tune_candidate *c) {
    const cf_parallel *split = &tuning->splits[c->split];
    cf_pack_desc desc = pack_with_cp_groups(job, c, split);
    cf_plan *plan = NULL;
    const int64_t *batch = &tuning->batches[tune_usual_batch(tuning) * tuning->batch];
    int64_t max_tries = job->asked->max_tries;

    desc.chunk_size = c->chunk_size;
    desc.n_ranks = split->dp;
    desc.lockstep = c->in_step;
    desc.shared_prefixes = tuning->shared_prefixes ? &tuning->shared_prefixes[tune_usual_batch(tuning) * tuning->batch]
                           : NULL;
    if (max_tries == 0 && cf_pack(batch, tuning->batch, &desc, &plan, NULL) == CF_OK)
        max_tries = cf_tune_max_tries(plan, split->pp, split->n_virtual);
    cf_plan_free(plan);
    return max_tries;
}

/* Returns whether the printed settings need the number of virtual stages: interleaved has 2 by default. */
static int names_virtual(const cf_tune_candidate *c, const cf_parallel *split) {
    return split->n_virtual > 1 || c->kind == CF_SCHEDULE_INTERLEAVED;
}

static void print_split(const cf_parallel *split) {
    printf(" --tp %lld --stages %lld --ranks %lld --zero %lld", (long long)split->tp, (long long)split->pp,
           (long long)split->dp, (long long)split->zero);
    if (split->ep > 1) printf(" --ep %lld", (long long)split->ep);
    if (split->recompute > CF_RECOMPUTE_NONE) printf(" --recompute %s", cf_recompute_name(split->recompute));
    if (split->recompute_layers > 0) printf(" --recompute-layers %lld", (long long)split->recompute_layers);
}

static void print_plan(const tune_job *job, const cf_tuning *tuning, const cf_tune_candidate *c,
                       const cli_option *options, const void *defaults) {
    int64_t ring = ring_bytes(job, tuning, c);
    cf_parallel split = tune_split(tuning, c);

    fputs("  chunkflow plan", stdout);
    printf(" --chunk-size %lld --k %lld --schedule %s --replay %s", (long long)c->chunk_size, (long long)c->k,
           cf_schedule_kind_name(c->kind), cf_replay_name(c->replay));
    print_split(&split);
    if (names_virtual(c, &split) && job->asked->modelling.n_virtual == 0)
        printf(" --virtual %lld", (long long)split.n_virtual);
    if (c->max_cp > 0) printf(" --max-cp %lld", (long long)c->max_cp);
    else if (c->in_step) fputs(" --lockstep", stdout);
    printf(" --limit none --limit-bytes %lld", (long long)tuning->limit_bytes);
    if (c->kind == CF_SCHEDULE_BEST) printf(" --max-tries %lld", (long long)tries_of(job, tuning, c));
    if (c->offload & ~job->desc.memory.offload) fputs(" --offload-checkpoints", stdout);
    if (ring > 0) printf(" --stream %lld", (long long)ring);
    if (c->outputs) printf(" --outputs %s", c->outputs > 1 ? "host" : "gpu");
    print_shared(job, options, defaults);
    fputs(" --summary --plan-json plan.json --all-ranks --json schedules.json", stdout);
    print_word(job->asked->batch_lengths && strcmp(job->asked->batch_lengths, "-") != 0 ? job->asked->batch_lengths
                                                                                       : "LENGTHS");
    putchar('\n');
}

/* ----------------------------------------------------------------------------------------------------------------
   Settings
   ---------------------------------------------------------------------------------------------------------------- */

static void print_upper(const char *name) {
    for (; *name; name++) putchar(*name == '-' ? '_' : *name >= 'a' && *name <= 'z' ? *name - 'a' + 'A' : *name);
}

static void print_c(const tune_job *job, const cf_tune_candidate *c, const cf_parallel *split) {
    cf_pack_desc cp_groups = pack_with_cp_groups(job, c, split);

    printf("  cf_pack_desc pack = {.chunk_size = %lld, .n_ranks = %lld", (long long)c->chunk_size,
           (long long)split->dp);
    if (c->max_cp > 0)
        printf(", .max_cp = %lld, .cp_row_seconds = %.17g, .cp_chunk_seconds = %.17g, .cost = {%.17g, %.17g, %.17g}",
               (long long)c->max_cp, cp_groups.cp_row_seconds, cp_groups.cp_chunk_seconds,
               cp_groups.cost.constant, cp_groups.cost.per_token, cp_groups.cost.per_pair);
    else if (c->in_step) fputs(", .lockstep = 1", stdout);
    if (job->asked->no_tails) fputs(", .no_tails = 1", stdout);
    if (job->asked->align > 1) printf(", .align = %lld", (long long)job->asked->align);
    if (job->shares) fputs(", .shared_prefixes = shares", stdout);
    fputs("};\n  cf_schedule_desc order = {.kind = CF_SCHEDULE_", stdout);
    print_upper(cf_schedule_kind_name(c->kind));
    printf(", .shape = {.n_stages = %lld, .k = %lld, .replay = CF_REPLAY_", (long long)split->pp, (long long)c->k);
    print_upper(cf_replay_name(c->replay));
    if (names_virtual(c, split))
        printf(", .n_virtual = %lld, .placement = CF_PLACEMENT_%s", (long long)split->n_virtual,
               split->placement == CF_PLACEMENT_V ? "V" : "LOOP");
    if (c->outputs) fputs(", .outputs = 1", stdout);
    printf("}, .limits = {.chunks = CF_NO_LIMIT}%s};\n", job->asked->split_backward ? ", .split_backward = 1" : "");
}

static void print_python(const tune_job *job, const cf_tune_candidate *c, const cf_parallel *split) {
    cf_pack_desc cp_groups = pack_with_cp_groups(job, c, split);

    printf("  plan = chunkflow.pack(lengths, chunk_size=%lld, n_ranks=%lld", (long long)c->chunk_size,
           (long long)split->dp);
    if (c->max_cp > 0)
        printf(", max_cp=%lld, cp_row_seconds=%.17g, cp_chunk_seconds=%.17g,\n                        "
               "cost={\"constant\": %.17g, \"per_token\": %.17g, \"per_pair\": %.17g}", (long long)c->max_cp,
               cp_groups.cp_row_seconds, cp_groups.cp_chunk_seconds,
               cp_groups.cost.constant, cp_groups.cost.per_token, cp_groups.cost.per_pair);
    else if (c->in_step) fputs(", lockstep=1", stdout);
    if (job->asked->no_tails) fputs(", no_tails=True", stdout);
    if (job->asked->align > 1) printf(", align=%lld", (long long)job->asked->align);
    if (job->shares) fputs(", shared_prefixes=shared_prefixes", stdout);
    printf(")\n  schedule = plan.schedule(kind=\"%s\", replay=\"%s\", n_stages=%lld, k=%lld",
           cf_schedule_kind_name(c->kind), cf_replay_name(c->replay), (long long)split->pp, (long long)c->k);
    if (names_virtual(c, split))
        printf(", n_virtual=%lld, placement=\"%s\"", (long long)split->n_virtual, cf_placement_name(split->placement));
    if (c->outputs) fputs(", outputs=1", stdout);
    printf(", limits={\"chunks\": chunkflow.lib.CF_NO_LIMIT}%s)\n",
           job->asked->split_backward ? ", split_backward=True" : "");
}

void tune_print_commands(const tune_job *job, const cf_tuning *tuning, const cli_option *options,
                         const void *defaults) {
    const cf_tune_candidate *c = &tuning->candidates[tuning->winner];
    const cf_parallel *split = &tuning->splits[c->split];

    puts("\nplan and schedules of a list of lengths with the best of them (--batch-lengths writes one of the batches)");
    print_plan(job, tuning, c, options, defaults);
    printf("\nin a trainer%s\n",
           c->limited ? ", where cf_tune_schedule makes the schedule, or cf_memory_limits its limits of bytes" : "");
    print_c(job, c, split);
    print_python(job, c, split);
    if (c->outputs)
        puts("  dropped chunks keep attention's outputs: cf_step.outputs in C, cf_executor_desc.outputs, "
             "Step(outputs=True).\n"
             "  A trainer that cannot (PyTorch's on a GPU, so far) wants the answer of tune --no-outputs");
}
