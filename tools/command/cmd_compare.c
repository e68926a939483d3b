/* cmd_compare.c - chunkflow compare: all schedules for one list of lengths, side by side. */

#include "json_write.h"
#include "baseline.h"
#include "progress.h"
#include "table.h"

#include <stdlib.h>
#include <string.h>

enum { REPLAY_PIPELINE = 1, REPLAY_LOCAL, REPLAY_BOTH };

typedef struct compare_options {
    packing_options packing;
    pipeline_options pipeline;
    const char *k;
    int64_t n_virtual;
    int64_t placement;
    int64_t replay;
    int tsv, no_cp;
    const char *json;
} compare_options;

static const compare_options defaults = {.pipeline = PIPELINE_DEFAULTS};

static const cli_option options[] = {
    PACKING_OPTIONS(compare_options, packing),
    PACKING_GANG_OPTION(compare_options, packing),
    {.name = "--k", .alias = "--ks", .value = "K,...", .kind = CLI_TEXT, .offset = offsetof(compare_options, k),
     .help = "most chunks of a chain that keep their activations; more\n"
     "than one number: a row for each;\n" PIPELINE_K_DEFAULT},
    VIRTUAL_OPTIONS(compare_options),
    {.name = "--replay", .value = "pipeline|local|both", .kind = CLI_CHOICE,
     .offset = offsetof(compare_options, replay),
     .help = "how dropped activations come back: through all stages again\n"
     "(paper alone), on each stage alone (the default), or both"},
    PIPELINE_OPTIONS(compare_options, pipeline),
    {.name = "--json", .value = "FILE|-", .kind = CLI_TEXT, .offset = offsetof(compare_options, json),
     .help = "write the table as JSON; with - nothing else is printed"},
    NO_CP_OPTION(compare_options),
    TABLE_OPTION(compare_options, tsv, "the table"),
    {.name = NULL}};

/* ----------------------------------------------------------------------------------------------------------------
   The rows
   ---------------------------------------------------------------------------------------------------------------- */

/* Forms of the baseline: one sequence per micro-batch, or as many as fit into the length of the longest. */
enum { UNSPLIT = 1, PACKED };

typedef struct row {
    pipeline_case what;
    int unsplit;          /* of the baseline: UNSPLIT or PACKED, else 0 */
    int at_paper;         /* 1: best, limited on every stage to the chunks that paper keeps there */
    cf_result result;
    char why[200];        /* where it failed */
    int64_t rank;         /* this and the following members are set only if it did not fail */
    int64_t n_virtual;
    cf_placement placement;
    double makespan, bubble_useful, bubble_busy, stream_seconds, bound;
    int64_t stream_waits;
    const char *strongest;
    int64_t peak_live, peak_tokens, peak_state, peak_bytes; /* the largest over all stages */
    cf_recompute recompute; /* with a model, like the following members */
    int offload;            /* parts in host memory (cf_memory_desc.offload) */
    int64_t memory, stage;  /* bytes of the fullest GPU */
    int too_large;          /* 1: more than it has */
    int held_down;          /* 1: it was made again under limits, to fit */
    int replays;
    pipeline_speed speed;   /* of the row's own plan */
} row;

typedef struct comparison {
    const compare_options *asked;
    pipeline pipe;
    packing packed;
    row *rows;
    int64_t n_rows;
    baseline_tuned context; /* if context parallelism makes the baseline faster; otherwise its `best` is untried */
    baseline_tuned recipe;
    double best; /* shortest makespan of rows that fit; 0: none */
    row with[2]; /* for --max-cp: all ranks with the best row's schedule, without cp groups and with them; makespan 0
                    without cp groups */
    const row *paper;     /* its last row */
    int64_t *paper_peaks; /* (n_stages) chunks that paper keeps */
} comparison;

static void measure(const comparison *t, const cf_plan *plan, const pipeline_run *run, row *r) {
    const cf_timeline *timeline = run->timeline;
    int64_t i;

    r->rank = run->schedule->shape.rank;
    r->n_virtual = run->schedule->shape.n_virtual;
    r->placement = run->schedule->shape.placement;
    r->makespan = t->pipe.every_rank ? pipeline_makespan(run) : timeline->makespan;
    r->bubble_useful = timeline->bubble_useful;
    r->bubble_busy = timeline->bubble_busy;
    r->stream_waits = timeline->stream_waits;
    r->stream_seconds = timeline->stream_seconds;
    r->bound = timeline->bound;
    r->strongest = pipeline_strongest(timeline);
    for (i = 0; i < timeline->n_stages; i++) {
        if (timeline->peak_live[i] > r->peak_live) r->peak_live = timeline->peak_live[i];
        if (timeline->peak_tokens[i] > r->peak_tokens) r->peak_tokens = timeline->peak_tokens[i];
        if (timeline->peak_state_tokens[i] > r->peak_state) r->peak_state = timeline->peak_state_tokens[i];
        if (timeline->peak_bytes[i] > r->peak_bytes) r->peak_bytes = timeline->peak_bytes[i];
    }
    r->replays = timeline->replayed > 0;
    r->held_down = run->held_down;
    r->speed = pipeline_speed_of(&t->pipe, plan, r->makespan);
    if (!run->memory) return;
    r->recompute = r->what.recompute ? r->what.recompute : t->pipe.model.parallel.recompute;
    r->stage = run->fullest;
    r->memory = run->memory[run->fullest].total;
    r->too_large = !pipeline_fits(&t->pipe, run);
}

/* Returns the options with a row's limits on chunks. */
static pipeline pipe_of(const comparison *t, const row *r) {
    pipeline pipe = t->pipe;

    if (!r->at_paper) return pipe;
    pipe.limit = 0;
    pipe.limits = t->paper_peaks;
    return pipe;
}

static void fill_case(comparison *t, const cf_plan *plan, row *r) {
    pipeline pipe = pipe_of(t, r);
    pipeline_run run;
    cf_error error;

    if (r->what.kind == CF_SCHEDULE_PAPER) t->paper = r;
    if (r->at_paper && t->paper->result != CF_OK) {
        r->result = t->paper->result;
        memcpy(r->why, t->paper->why, sizeof r->why);
        return;
    }
    r->result = pipeline_run_make(&pipe, plan, &r->what, &run, &error);
    if (r->result == CF_OK) {
        measure(t, plan, &run, r);
        if (t->paper == r)
            memcpy(t->paper_peaks, run.timeline->peak_live, (size_t)t->pipe.n_stages * sizeof *t->paper_peaks);
        pipeline_run_free(&run);
    } else {
        memcpy(r->why, error.text, sizeof r->why);
    }
}

static void fill_baseline(const comparison *t, row *r) {
    baseline base;
    cf_error error;

    r->result = baseline_make(&t->pipe, &t->packed, &t->asked->packing, r->unsplit == PACKED, NULL, &base, &error);
    if (r->result == CF_OK) {
        r->what = base.what;
        measure(t, base.plan, &base.run, r);
        r->offload = base.offload;
        baseline_free(&base);
    } else {
        memcpy(r->why, error.text, sizeof r->why);
    }
}

/* Rows that add_rows counts: the kinds, then best with split backwards, then best with paper's peaks as limits. */
enum { BEST_SPLIT = CF_SCHEDULE_COUNT, BEST_AT_PAPER, ROW_KINDS };

static void add_row(comparison *t, int64_t kind, int64_t replay, int64_t k) {
    row *r = &t->rows[t->n_rows++];

    r->what.kind = (cf_schedule_kind)(kind < CF_SCHEDULE_COUNT ? kind : CF_SCHEDULE_BEST);
    r->what.replay = (cf_replay)replay;
    r->what.k = k;
    r->what.split_backward = kind == BEST_SPLIT;
    r->at_paper = kind == BEST_AT_PAPER;
    pipeline_place(&r->what, t->asked->n_virtual, (cf_placement)t->asked->placement);
}

/* Returns whether there is a row of this kind and form of replay. */
static int has_rows(const pipeline *p, int64_t kind, int64_t replay) {
    if (replay != CF_REPLAY_LOCAL || pipeline_takes_paper(p)) return kind == CF_SCHEDULE_PAPER;
    return p->max_cp < 2 || (kind != CF_SCHEDULE_ZERO_BUBBLE && kind != BEST_SPLIT);
}

/* Adds rows of every kind with every K, and of paper with every form of replay. */
static int add_rows(comparison *t, const int64_t *k, int64_t n_k) {
    int64_t asked = t->asked->replay > 0 ? t->asked->replay : REPLAY_LOCAL;
    int64_t first = asked == REPLAY_LOCAL ? CF_REPLAY_LOCAL : CF_REPLAY_PIPELINE;
    int64_t last = asked == REPLAY_PIPELINE ? CF_REPLAY_PIPELINE : CF_REPLAY_LOCAL;
    int64_t i, replay, kind;

    t->rows = (row *)calloc((size_t)(n_k * 2 * ROW_KINDS + 2), sizeof *t->rows);
    t->paper_peaks = (int64_t *)calloc((size_t)t->pipe.n_stages, sizeof *t->paper_peaks);
    if (!t->rows || !t->paper_peaks) return cli_failed("out of memory");
    for (t->n_rows = 0; t->n_rows < 2; t->n_rows++) {
        row *r = &t->rows[t->n_rows];
        r->unsplit = t->n_rows == 0 ? UNSPLIT : PACKED;
        r->what.kind = CF_SCHEDULE_1F1B;
    }
    for (i = 0; i < n_k; i++)
        for (replay = first; replay <= last; replay++)
            for (kind = CF_SCHEDULE_PAPER; kind < ROW_KINDS; kind++)
                if (has_rows(&t->pipe, kind, replay)) add_row(t, kind, replay, k[i]);
    return CLI_OK;
}

static const char *row_name(const row *r) {
    int turns = r->result == CF_OK && r->placement == CF_PLACEMENT_V && r->n_virtual > 1;

    if (r->at_paper) return turns ? "best as paper, V" : "best as paper";
    if (r->unsplit) return r->unsplit == PACKED ? "1f1b, packed" : "1f1b, unsplit";
    if (r->what.split_backward) return turns ? "best, I + W, V" : "best, I + W";
    if (turns) return r->what.kind == CF_SCHEDULE_BEST ? "best, V" : "zero-bubble, V";
    return cf_schedule_kind_name(r->what.kind);
}

/* Returns the row with the shortest makespan that fits, of the baseline or of the chunks; NULL if there is none. Of
   equal ones it is the first. Rows that no --schedule names are left out. */
static const row *shortest(const comparison *t, int unsplit) {
    const row *found = NULL;
    int64_t i;

    for (i = 0; i < t->n_rows; i++) {
        const row *r = &t->rows[i];
        if (r->result != CF_OK || r->too_large || r->at_paper || (r->unsplit != 0) != unsplit) continue;
        if (!found || r->makespan < found->makespan * (1 - 1e-9)) found = r;
    }
    return found;
}

/* Finds the time and memory of all ranks of a plan, scheduled as in a row. */
static cf_result fill_ranks(const comparison *t, const cf_plan *plan, const row *like, row *all, int lockstep,
                            cf_error *error) {
    pipeline pipe = pipe_of(t, like);
    pipeline_run run;
    cf_result result;

    pipe.lockstep = lockstep;
    pipe.every_rank = 1;
    pipeline_take_cp(&pipe, plan);
    all->what = like->what;
    result = pipeline_run_make(&pipe, plan, &all->what, &run, error);
    if (result != CF_OK) return result;
    measure(t, plan, &run, all);
    all->makespan = pipeline_makespan(&run);
    pipeline_run_free(&run);
    return CF_OK;
}

static int fill_cp_groups(comparison *t) {
    const row *like = shortest(t, 0) ? shortest(t, 0) : t->paper;
    packing_options plain = t->asked->packing;
    packing without;
    cf_error error;
    cf_result result;
    int code;

    if (t->pipe.max_cp < 2) return CLI_OK;
    plain.max_cp = 0;
    code = packing_of_lengths(&plain, t->packed.list.path, t->packed.lengths, NULL, t->packed.list.n_sequences,
                              &without);
    if (code != CLI_OK) return code;
    result = fill_ranks(t, without.plan, like, &t->with[0], 0, &error);
    if (result == CF_OK) result = fill_ranks(t, t->packed.plan, like, &t->with[1], 1, &error);
    packing_free(&without);
    return result == CF_OK ? CLI_OK : cli_error(&error, NULL);
}

static int fill_context(comparison *t) {
    const row *base = shortest(t, 1);
    double than = base ? base->makespan : 0;
    cf_error error;

    if (t->asked->no_cp) return CLI_OK;
    progress_set(t->n_rows, t->n_rows, "context parallelism");
    if (baseline_find_context(&t->pipe, &t->packed, &t->asked->packing, than, &t->context, &t->recipe, &error) == CF_OK)
        return CLI_OK;
    return cli_error(&error, NULL);
}

static int fill_table(comparison *t) {
    int64_t *given = NULL, n_k = 1, k = 1, i;
    cf_replay replay = t->asked->replay == REPLAY_PIPELINE ? CF_REPLAY_PIPELINE : CF_REPLAY_LOCAL;
    int code = CLI_OK;

    if (t->asked->k) code = cli_take_numbers("compare", "--k", t->asked->k, 1, INT32_MAX, &given, &n_k);
    else k = pipeline_default_k(&t->pipe, t->packed.plan, replay);
    if (code == CLI_OK) code = add_rows(t, given ? given : &k, n_k);
    free(given);
    progress_begin("comparing");
    for (i = 0; code == CLI_OK && i < t->n_rows; i++) {
        row *r = &t->rows[i];
        progress_set(i, t->n_rows, row_name(r));
        if (r->unsplit) fill_baseline(t, r);
        else fill_case(t, t->packed.plan, r);
        if (r->result == CF_OK && !r->too_large && (t->best == 0 || r->makespan < t->best)) t->best = r->makespan;
        if (r->result == CF_ERROR_MEMORY) code = cli_failed("%s", r->why);
    }
    if (code == CLI_OK) code = fill_cp_groups(t);
    if (code == CLI_OK) code = fill_context(t);
    progress_end();
    return code;
}

/* ----------------------------------------------------------------------------------------------------------------
   As text
   ---------------------------------------------------------------------------------------------------------------- */

static double ratio(double value, double to) {
    return to > 0 ? value / to : 1;
}

static const table_column columns[] = {
    {.heading = "schedule", .name = "row", .left = 1},
    {.name = "schedule"},
    {.name = "unsplit"},
    {.name = "split_backward"},
    {.name = "at_paper_peaks"},
    {.heading = "K", .name = "k", .decimals = TABLE_PLAIN, .key = 1},
    {.heading = "replay", .name = "replay", .left = 1, .key = 1},
    {.name = "virtual_stages"},
    {.name = "placement"},
    {.heading = "makespan", .name = "makespan_", .estimate = 1},
    {.name = "estimated"},
    {.heading = "x fastest", .name = "ratio", .decimals = 2},
    {.heading = "waste %", .name = "bubble_useful", .decimals = 2, .scale = 100},
    {.heading = "idle %", .name = "bubble_busy", .decimals = 2, .scale = 100},
    {.heading = "kept", .name = "peak_chunk_copies"},
    {.heading = "kept tokens", .name = "peak_token_copies"},
    {.heading = "state tokens", .name = "peak_state_token_copies"},
    {.heading = "bytes", .name = "peak_byte_copies"},
    {.heading = "recompute", .name = "recompute", .left = 1},
    {.heading = "GiB", .name = "memory_bytes", .decimals = 2, .scale = 1 / 1073741824.0},
    {.name = "memory_stage"},
    {.name = "fits"},
    {.name = "held_down"},
    {.name = "stream_waits"},
    {.heading = "waits %", .name = "stream_waiting", .decimals = 2, .scale = 100},
    {.heading = "tokens/s", .name = "tokens_per_s_a_gpu", .estimate = 1},
    {.heading = "MFU %", .name = "model_flops_utilisation", .decimals = 1, .scale = 100},
    {.heading = "bound", .name = "bound_", .estimate = 1},
    {.heading = "gap %", .decimals = 2, .scale = 100},
    {.heading = "by", .name = "bound_name", .left = 1},
    {.name = "rank"},
    {.name = "why"}};
enum { COLUMN_REPLAY = 6, COLUMN_STATE = 16, COLUMN_BYTES, COLUMN_RECOMPUTE, COLUMN_GIB, COLUMN_WAITS = 24,
       COLUMN_SPEED, COLUMN_MFU, COLUMN_BY = 29, N_COLUMNS = sizeof columns / sizeof columns[0] };

/* Adds the cells that name a case. */
static void add_case(table *to, const row *r) {
    table_text(to, row_name(r));
    table_text(to, cf_schedule_kind_name(r->what.kind));
    table_integer(to, r->unsplit != 0);
    table_integer(to, r->what.split_backward);
    table_integer(to, r->at_paper);
    if (r->unsplit) {
        table_none(to);
        table_none(to);
    } else {
        table_integer(to, r->what.k);
        table_text(to, cf_replay_name(r->what.replay));
    }
}

static void add_memory(table *to, const comparison *t, const row *r) {
    int i;

    if (t->pipe.counts_bytes) table_share(to, r->peak_bytes, r->n_virtual);
    else table_none(to);
    for (i = 0; i < 5 && !t->pipe.has_model; i++) table_none(to);
    if (!t->pipe.has_model) return;
    table_text(to, !to->tsv && r->offload & CF_OFFLOAD_CHECKPOINTS ? "full, host" : cf_recompute_name(r->recompute));
    table_integer(to, r->memory);
    table_mark(to, r->too_large ? '!' : r->held_down ? '*' : ' ');
    table_integer(to, r->stage);
    table_integer(to, !r->too_large);
    table_integer(to, r->held_down);
}

static void add_speed(table *to, const comparison *t, const row *r) {
    if (t->pipe.has_model && !t->pipe.unit_cost && r->speed.tokens_per_second > 0)
        table_real(to, r->speed.tokens_per_second);
    else table_none(to);
    if (t->pipe.has_model && !t->pipe.unit_cost && r->speed.utilisation >= 0) table_real(to, r->speed.utilisation);
    else table_none(to);
}

/* Adds the result cells of a row, after those of add_case. */
static void add_result(table *to, const comparison *t, const row *r) {
    table_integer(to, r->n_virtual);
    table_text(to, cf_placement_name(r->placement));
    table_real(to, r->makespan);
    table_integer(to, !t->pipe.unit_cost);
    table_real(to, ratio(r->makespan, t->best));
    table_real(to, r->bubble_useful);
    table_real(to, r->bubble_busy);
    table_share(to, r->peak_live, r->n_virtual);
    table_share(to, r->peak_tokens, r->n_virtual);
    table_share(to, r->peak_state, r->n_virtual);
    add_memory(to, t, r);
    table_integer(to, r->stream_waits);
    table_real(to, r->makespan > 0 ? r->stream_seconds / (r->makespan * (double)t->pipe.n_stages) : 0);
    add_speed(to, t, r);
    table_real(to, r->bound);
    table_real(to, ratio(r->makespan, r->bound) - 1);
    table_text(to, r->strongest);
    table_integer(to, r->rank);
    table_none(to);
}

/* Returns the name of the strongest bound, if it is the same in all rows; else NULL. */
static const char *only_bound(const comparison *t) {
    const char *name = NULL;
    int64_t i;

    for (i = 0; i < t->n_rows; i++) {
        if (t->rows[i].result != CF_OK) continue;
        if (name && strcmp(name, t->rows[i].strongest) != 0) return NULL;
        name = t->rows[i].strongest;
    }
    return name;
}

/* Prints the rows. Columns without information are hidden from people: GiB include the state. */
static int print_rows(const comparison *t) {
    table to;
    int64_t i;

    table_begin(&to, columns, N_COLUMNS, t->asked->tsv, t->pipe.unit_cost);
    to.hidden = (t->asked->replay == REPLAY_BOTH ? 0u : 1u << COLUMN_REPLAY) | (only_bound(t) ? 1u << COLUMN_BY : 0u) |
                (t->pipe.has_model ? 1u << COLUMN_STATE : 0u) |
                (t->pipe.counts_bytes ? 0u : 1u << COLUMN_BYTES) |
                (t->pipe.has_model ? 0u : 1u << COLUMN_RECOMPUTE | 1u << COLUMN_GIB) |
                (t->pipe.memory.state_window > 0 ? 0u : 1u << COLUMN_WAITS) |
                (t->pipe.has_model && !t->pipe.unit_cost ? 0u : 1u << COLUMN_SPEED) |
                (t->pipe.estimates ? 0u : 1u << COLUMN_MFU);
    for (i = 0; i < t->n_rows && !cli_stdout_failed(); i++) {
        add_case(&to, &t->rows[i]);
        if (t->rows[i].result == CF_OK) {
            add_result(&to, t, &t->rows[i]);
        } else {
            table_none(&to);
            table_none(&to);
            table_none(&to);
            table_none(&to);
            table_note(&to, t->rows[i].why);
        }
    }
    return table_end(&to);
}

static void print_held(const comparison *t, const row *r) {
    printf("%s%s %s", t->pipe.unit_cost ? "" : "an estimated ", pipeline_duration(r->makespan, t->pipe.unit_cost),
           pipeline_unit(t->pipe.unit_cost));
    if (t->pipe.has_model)
        printf(", %.2f GiB, recompute %s%s", modelling_gib(r->memory), cf_recompute_name(r->recompute),
               modelling_offload_words(r->offload));
    else printf(", at most %s tokens kept", pipeline_share(r->peak_tokens, r->n_virtual));
}

/* Prints the best row of chunks, the summary's first line. */
static void print_chunks(const comparison *t, const row *ours) {
    printf("chunks            %s, K = %s, %s replay: ", row_name(ours), cli_commas(ours->what.k),
           cf_replay_name(ours->what.replay));
    print_held(t, ours);
}

/* Prints why no form of the baseline can be made. */
static void print_no_baseline(const comparison *t) {
    const row *r = &t->rows[0];

    if (r->result != CF_OK) printf("baseline          cannot be made: %s\n", r->why);
    else
        printf("baseline          does not fit: needs %.2f GiB on stage %lld with full recomputation%s\n",
               modelling_gib(r->memory), (long long)r->stage, modelling_offload_words(r->offload));
}

/* Prints the baseline with context parallelism if it is faster than the other, or the only one that fits. */
static int print_context(const comparison *t, const row *ours) {
    const cf_tune_candidate *c = &t->context.best;
    char words[384];

    if (c->status != CF_TUNE_OK) return 0;
    baseline_context_words(&t->context, words, sizeof words);
    printf("baseline          %s:\n                  %s s, %.2f GiB\n", words, pipeline_estimate(c->seconds),
           modelling_gib(c->bytes));
    if (ours) {
        double seconds = t->pipe.max_cp > 1 ? t->with[1].makespan : ours->makespan;
        print_chunks(t, ours);
        if (t->context.ranks > 1 && !t->pipe.every_rank && t->pipe.max_cp < 2)
            printf("; rank %lld alone", (long long)t->pipe.rank);
        printf("; %s the baseline\n", pipeline_pace(seconds, c->seconds));
        if (c->seconds < seconds)
            puts("                  The baseline is faster: GPUs that share each sequence leave no pipeline to fill.\n"
                 "                  --no-cp is without.");
    }
    return 1;
}

/* Prints the times of the ranks with and without cp groups. */
static void print_cp_groups(const comparison *t) {
    int64_t rows, widest = packing_cp_groups(t->packed.plan, &rows);
    int i;

    for (i = 1; i >= 0; i--) {
        printf("%-18s", i ? "cp groups" : "");
        if (i) printf("of up to %s ranks; ", cli_commas(widest));
        else fputs("without: ", stdout);
        printf(i ? "all %s in step take %s %s" : "the most expensive of %s takes %s %s",
               cli_commas(t->packed.plan->n_ranks),
               pipeline_duration(t->with[i].makespan, t->pipe.unit_cost), pipeline_unit(t->pipe.unit_cost));
        if (t->pipe.has_model) printf(", and one needs %.2f GiB", modelling_gib(t->with[i].memory));
        if (i && t->pipe.has_model && t->pipe.memory.gathered > 0)
            printf(", a layer of %s rows included", cli_commas(t->pipe.memory.gathered));
        putchar('\n');
    }
}

/* Prints the comparison of the baseline with the best row of chunks. */
static void print_verdict(const comparison *t, const row *ours) {
    const row *base = shortest(t, 1);
    const cf_plan *plan = t->packed.plan;
    cf_plan_stats stats;

    putchar('\n');
    if (t->pipe.max_cp > 1) print_cp_groups(t);
    if (print_context(t, ours)) return;
    if (!base) {
        print_no_baseline(t);
        return;
    }
    printf("baseline          %s: ", row_name(base));
    print_held(t, base);
    if (!ours) {
        puts("; no schedule of chunks can be had");
        return;
    }
    putchar('\n');
    print_chunks(t, ours);
    printf("; %s the baseline\n", pipeline_pace(ours->makespan, base->makespan));
    if (!(base->makespan < ours->makespan)) return;
    cf_plan_measure(plan, NULL, &stats);
    printf("                  The baseline is faster:\n                  %s.\n",
           packing_why_unsplit(stats.longest_sequence, plan->chunk_size, (double)plan->chunks_per_rank,
                               t->pipe.n_stages,
                               ours->replays));
}

static int print_table(const comparison *t) {
    const row *ours = shortest(t, 0);
    const cf_plan *plan = t->packed.plan;
    int code;

    if (t->asked->tsv) return print_rows(t);
    packing_print_input(&t->packed);
    pipeline_print_setting(&t->pipe);
    printf("plan              %s of at most %s, %s; ", cli_counted(plan->n_chunks, "chunk"),
           cli_counted(plan->chunk_size, "token"), cli_counted(plan->n_chains, "chain"));
    if (t->pipe.every_rank) printf("%s, ", cli_counted(plan->n_ranks, "rank"));
    else printf("rank %s of %s, ", cli_commas(t->pipe.rank), cli_commas(plan->n_ranks));
    printf("%s\n", cli_counted(t->pipe.n_stages, "stage"));
    if (!t->asked->k)
        printf("K                 %s, %s; --k for another\n", cli_commas(t->rows[t->n_rows - 1].what.k),
               pipeline_default_k_words(&t->pipe));
    printf("times             in %s%s. waste %%: idle time and replays; idle %%: idle time alone. kept: the most\n"
           "                  chunks and tokens on a stage. bound: the strongest lower bound for that row%s%s.\n"
           "                  best as paper: best, each stage held to the chunks that paper keeps there%s\n",
           pipeline_unit(t->pipe.unit_cost), t->pipe.unit_cost ? "" : ", estimated", only_bound(t) ? ", " : "",
           only_bound(t) ? only_bound(t) : "",
           t->pipe.gpu_bytes > 0 ? ". GiB: of the fullest GPU; with !\n                  more than it may hold, with * "
                                   "best is held down to that" : "");
    if (t->pipe.every_rank && plan->n_ranks > 1)
        puts(t->pipe.lockstep
                 ? "                  Of each row the time of all ranks in step, and the most GiB of any rank; the\n"
                   "                  rest is of the rank that is slowest alone"
                 : "                  Of each row the slowest rank's, except GiB, which are the most of any rank");
    if (t->pipe.gpu_bytes > 0)
        printf("memory limit      the %.2f GiB %s\n", modelling_gib(t->pipe.gpu_bytes), pipeline_room_words(&t->pipe));
    if (t->pipe.memory.state_window > 0)
        puts("                  waits: the part of all stages' time in which passes wait for their stream of state");
    putchar('\n');
    code = print_rows(t);
    if (code == CLI_OK) print_verdict(t, ours);
    if (code == CLI_OK) baseline_print_recipe(&t->recipe, ours ? ours->makespan : 0);
    return code;
}

/* ----------------------------------------------------------------------------------------------------------------
   As JSON
   ---------------------------------------------------------------------------------------------------------------- */

static void write_row(json_writer *w, const comparison *t, const row *r) {
    json_open(w, NULL, '{');
    json_text_member(w, "schedule", cf_schedule_kind_name(r->what.kind));
    json_bool_member(w, "unsplit", r->unsplit != 0);
    json_bool_member(w, "at_paper_peaks", r->at_paper);
    if (r->unsplit) json_bool_member(w, "packed", r->unsplit == PACKED);
    if (!r->unsplit) {
        json_integer_member(w, "k", r->what.k);
        json_text_member(w, "replay", cf_replay_name(r->what.replay));
        json_bool_member(w, "split_backward", r->what.split_backward);
    }
    if (r->result != CF_OK) {
        json_text_member(w, "error", cf_result_name(r->result));
        json_text_member(w, "why", r->why);
    } else {
        json_integer_member(w, "rank", r->rank);
        json_integer_member(w, "virtual_stages", r->n_virtual);
        json_text_member(w, "placement", cf_placement_name(r->placement));
        json_number_member(w, "makespan", r->makespan);
        json_number_member(w, "ratio", ratio(r->makespan, t->best));
        json_number_member(w, "bubble_useful", r->bubble_useful);
        json_number_member(w, "bubble_busy", r->bubble_busy);
        json_integer_member(w, "stream_waits", r->stream_waits);
        json_number_member(w, "stream_seconds", r->stream_seconds);
        json_integer_member(w, "peak_live", r->peak_live);
        json_integer_member(w, "peak_tokens", r->peak_tokens);
        json_integer_member(w, "peak_state_tokens", r->peak_state);
        json_integer_member(w, "peak_bytes", r->peak_bytes);
        if (t->pipe.has_model && !t->pipe.unit_cost)
            pipeline_write_speed(w, &r->speed);
        if (t->pipe.has_model) {
            json_text_member(w, "recompute", cf_recompute_name(r->recompute));
            json_integer_member(w, "offload", r->offload);
            json_integer_member(w, "memory", r->memory);
            json_integer_member(w, "memory_stage", r->stage);
            json_bool_member(w, "fits", !r->too_large);
            json_bool_member(w, "held_down", r->held_down);
        }
        json_number_member(w, "bound", r->bound);
        json_text_member(w, "bound_name", r->strongest);
    }
    json_close(w, '}');
}

static void write_json(const comparison *t, cli_output *to) {
    json_writer w;
    int64_t i, rows;

    json_write_begin(&w, to, "chunkflow-comparison");
    json_integer_member(&w, "chunk_size", t->packed.plan->chunk_size);
    json_integer_member(&w, "stages", t->pipe.n_stages);
    if (!t->pipe.every_rank) json_integer_member(&w, "rank", t->pipe.rank);
    json_text_member(&w, "unit", t->pipe.unit_cost ? "token times" : "seconds");
    json_bool_member(&w, "estimated", !t->pipe.unit_cost);
    if (t->pipe.has_model) modelling_write(&w, &t->pipe.model);
    if (t->context.best.status == CF_TUNE_OK) baseline_write(&w, "context_baseline", &t->context);
    if (t->recipe.best.status == CF_TUNE_OK || t->recipe.least > 0) baseline_write(&w, "fsdp_recipe", &t->recipe);
    if (t->pipe.max_cp > 1) {
        json_open(&w, "cp_groups", '{');
        json_integer_member(&w, "widest", packing_cp_groups(t->packed.plan, &rows));
        json_number_member(&w, "makespan", t->with[1].makespan);
        json_number_member(&w, "makespan_without", t->with[0].makespan);
        if (t->pipe.has_model) json_integer_member(&w, "memory", t->with[1].memory);
        if (t->pipe.has_model) json_integer_member(&w, "memory_without", t->with[0].memory);
        json_close(&w, '}');
    }
    json_open(&w, "rows", '[');
    for (i = 0; i < t->n_rows; i++) write_row(&w, t, &t->rows[i]);
    json_close(&w, ']');
    json_write_end(&w);
}

/* ----------------------------------------------------------------------------------------------------------------
   The command
   ---------------------------------------------------------------------------------------------------------------- */

static int compare(comparison *t) {
    cli_output json = {0};
    int code = fill_table(t);

    if (code == CLI_OK) code = cli_output_open(&json, t->asked->json);
    if (code == CLI_OK && json.stream) write_json(t, &json);
    if (code == CLI_OK && json.stream != stdout) code = print_table(t);
    return cli_outputs_finish(&json, 1, code);
}

static int run(const void *given, char **operands, int n_operands) {
    comparison t;
    packing_options priced;
    int code;

    (void)n_operands;
    memset(&t, 0, sizeof t);
    t.asked = (const compare_options *)given;
    priced = t.asked->packing;
    code = table_check("compare", t.asked->tsv, "--json", t.asked->json);
    if (code == CLI_OK) code = pipeline_open("compare", &t.asked->pipeline, t.asked->packing.ranks, &t.pipe);
    if (code != CLI_OK) return code;
    t.pipe.every_rank = t.asked->pipeline.rank < 0;
    code = pipeline_pack(&t.pipe, &priced, operands[0], &t.packed);
    if (code == CLI_OK) {
        code = compare(&t);
        free(t.rows);
        free(t.paper_peaks);
        packing_free(&t.packed);
    }
    pipeline_close(&t.pipe);
    return code;
}

const cli_command cmd_compare = {
    .name = "compare", .operands = "FILE|-", .min_operands = 1, .max_operands = 1,
    .summary = "all schedules for one list of lengths, side by side",
    .details =
    "The first rows are the baseline, which splits nothing: 1f1b where every sequence is a micro-batch of its own,\n"
    "longest first, and 1f1b where they are packed into micro-batches as long as the longest. No limit of chunks\n"
    "holds for it; with --model and --gpu it recomputes as little as it needs to fit. Where it is faster than all\n"
    "schedules of chunks, the summary says why. A schedule that cannot be made also says why. Of several ranks a row\n"
    "has the slowest's time and the memory of the fullest; --rank asks for one alone. Below stands the recipe that most\n"
    "trainers have: FSDP, full recomputation with checkpoints in host memory, and context parallelism that just fits.\n\n"
    PIPELINE_HELP CLI_LIST_HELP,
    .options = options, .defaults = &defaults, .options_size = sizeof defaults, .run = run};
