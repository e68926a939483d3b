/* report.c - the data of a report as JSON, and the page around it. */

#include "report.h"
#include "report_page.h"

#include <math.h>
#include <string.h>

/* ----------------------------------------------------------------------------------------------------------------
   The batch and its chunks
   ---------------------------------------------------------------------------------------------------------------- */

static void write_lengths(json_writer *w, const packing *packed) {
    int64_t n[PACKING_BUCKETS], tokens[PACKING_BUCKETS];

    packing_count_lengths(packed, n, tokens);
    json_open(w, "lengths", '{');
    json_integers_member(w, "sequences", n, PACKING_BUCKETS);
    json_integers_member(w, "tokens", tokens, PACKING_BUCKETS);
    json_close(w, '}');
}

#define WRITE_CHUNK_LIST(w, plan, first, member)                                             \
    do {                                                                                     \
        int64_t chunk_;                                                                      \
        json_list_open(w, #member);                                                          \
        for (chunk_ = first; chunk_ < (first) + (plan)->chunks_per_rank; chunk_++)           \
            json_list_integer(w, (plan)->chunks[chunk_].member);                             \
        json_list_close(w);                                                                  \
    } while (0)

/* Writes the chunks of the scheduled rank; for their slices sequence, begin and length, one after another. */
static void write_chunks(json_writer *w, const cf_plan *plan, int64_t first) {
    int64_t i, n = 0, end = first + plan->chunks_per_rank;

    WRITE_CHUNK_LIST(w, plan, first, chain);
    WRITE_CHUNK_LIST(w, plan, first, index);
    WRITE_CHUNK_LIST(w, plan, first, prefix);
    WRITE_CHUNK_LIST(w, plan, first, tokens);
    WRITE_CHUNK_LIST(w, plan, first, rows);
    WRITE_CHUNK_LIST(w, plan, first, n_slices);
    if (plan->order) {
        json_list_open(w, "tree");
        for (i = first; i < end; i++) json_list_integer(w, packing_tree(plan, &plan->chunks[i]));
        json_list_close(w);
    }
    for (i = first; i < end; i++) n += plan->chunks[i].n_slices;
    if (n > REPORT_MOST_SLICES) return;
    json_list_open(w, "slices");
    for (i = first; i < end; i++) {
        const cf_slice *slice = &plan->slices[plan->chunks[i].first_slice];
        const cf_slice *last = slice + plan->chunks[i].n_slices;
        for (; slice < last; slice++) {
            json_list_integer(w, slice->sequence);
            json_list_integer(w, slice->begin);
            json_list_integer(w, slice->length);
        }
    }
    json_list_close(w);
}

static void write_plan(json_writer *w, const report_plan *p, int64_t rank) {
    cf_plan_stats stats;

    cf_plan_measure(p->plan, NULL, &stats);
    json_open(w, NULL, '{');
    json_text_member(w, "name", p->name);
    json_integer_member(w, "chunk_size", p->plan->chunk_size);
    json_integer_member(w, "align", p->plan->align);
    json_integer_member(w, "first_chunk", rank * p->plan->chunks_per_rank);
    json_integer_member(w, "n_chunks", p->plan->n_chunks);
    json_integer_member(w, "n_chains", p->plan->n_chains);
    json_integer_member(w, "n_standalone", stats.n_standalone);
    json_integer_member(w, "n_dependent", stats.n_dependent);
    json_integer_member(w, "n_hybrid", stats.n_hybrid);
    json_integer_member(w, "n_idle", stats.n_idle);
    json_integer_member(w, "lower_bound", p->plan->lower_bound);
    json_integer_member(w, "longest_chain", stats.longest_chain);
    json_number_member(w, "fill", stats.fill);
    if (p->plan->order) {
        json_integer_member(w, "rows", stats.rows);
        json_number_member(w, "pairs", stats.pairs);
        json_number_member(w, "unshared_pairs", stats.unshared_pairs);
    }
    json_open(w, "chunks", '{');
    write_chunks(w, p->plan, rank * p->plan->chunks_per_rank);
    json_close(w, '}');
    json_close(w, '}');
}

/* ----------------------------------------------------------------------------------------------------------------
   A schedule's passes: small whole numbers, most of them differences, because there may be a million of them
   ---------------------------------------------------------------------------------------------------------------- */

/* Times are counted in ticks: a makespan has 2^23 to 2^24. Memory is counted in units: a peak has at most 2^16. Both
   are powers of two, so whole numbers of unit costs stay exact. */
enum { TICK_BITS = 24, UNIT_BITS = 16 };

typedef struct stream {
    json_writer *w;
    const report_schedule *s;
    double tick;
    int64_t unit;
} stream;

static double tick_of(const cf_timeline *timeline) {
    int exponent;
    double tick;

    (void)frexp(timeline->makespan, &exponent);
    tick = ldexp(1, exponent - TICK_BITS);
    return timeline->makespan > 0 && tick > 0 ? tick : 1;
}

static int64_t unit_of(const report_schedule *s) {
    int64_t unit = 1, most = 0, i;

    for (i = 0; i < s->schedule->n_actions; i++)
        if (s->held[i] > most) most = s->held[i];
    while (most / unit >= (int64_t)1 << UNIT_BITS) unit *= 2;
    return unit;
}

static int64_t ticks(const stream *t, double time) { return (int64_t)(time / t->tick + 0.5); }

static int is_pass(const stream *t, int64_t id) { return t->s->schedule->actions[id].pass < CF_COMPUTE_PASS_COUNT; }

/* Writes a letter for each pass of a stage; lower case if the activations are dropped. */
static void write_letters(const stream *t, int64_t stage) {
    const cf_schedule *s = t->s->schedule;
    int64_t i;

    json_string_open(t->w, "pass");
    for (i = s->first[stage]; i < s->first[stage + 1]; i++) {
        const cf_action *a = &s->actions[i];
        if (is_pass(t, i)) json_string_put(t->w, a->pass <= CF_R && !a->keep ? "fr"[a->pass] : "FRBIW"[a->pass]);
    }
    json_string_close(t->w);
}

/* Writes the event after which each pass started: 1 the previous pass, 2 the neighbour's, 0 neither. */
static void write_bindings(const stream *t, int64_t stage) {
    const cf_schedule *s = t->s->schedule;
    int64_t i, before = -1;

    json_string_open(t->w, "after");
    for (i = s->first[stage]; i < s->first[stage + 1]; i++) {
        int64_t to = t->s->idle.waited_for[i];
        if (!is_pass(t, i)) continue;
        json_string_put(t->w, to < 0 ? '0' : to == before ? '1' : '2');
        before = i;
    }
    json_string_close(t->w);
}

static void write_members(const stream *t, int64_t stage) {
    const cf_schedule *s = t->s->schedule;
    int64_t i, before = 0;

    json_list_open(t->w, "chunk");
    for (i = s->first[stage]; i < s->first[stage + 1]; i++) {
        if (!is_pass(t, i)) continue;
        json_list_integer(t->w, s->actions[i].chunk - before);
        before = s->actions[i].chunk;
    }
    json_list_close(t->w);
    if (s->shape.n_virtual > 1) {
        json_list_open(t->w, "row");
        for (i = s->first[stage]; i < s->first[stage + 1]; i++)
            if (is_pass(t, i)) json_list_integer(t->w, s->actions[i].stage / s->shape.n_stages);
        json_list_close(t->w);
    }
    json_list_open(t->w, "ticks");
    for (i = s->first[stage]; i < s->first[stage + 1]; i++)
        if (is_pass(t, i))
            json_list_integer(t->w, ticks(t, t->s->timeline->end[i]) - ticks(t, t->s->timeline->start[i]));
    json_list_close(t->w);
}

static void write_held(const stream *t, int64_t stage) {
    const cf_schedule *s = t->s->schedule;
    int64_t i, before = 0;

    json_list_open(t->w, "held");
    for (i = s->first[stage]; i < s->first[stage + 1]; i++) {
        if (!is_pass(t, i)) continue;
        json_list_integer(t->w, t->s->held[i] / t->unit - before);
        before = t->s->held[i] / t->unit;
    }
    json_list_close(t->w);
}

/* Writes a stage's idle pieces. Digits come first: the number of pieces before each pass, and after the last one. Then
   each piece has its cause and its ticks. */
static void write_idle(const stream *t, int64_t stage) {
    const cf_schedule *s = t->s->schedule;
    const idle_report *idle = &t->s->idle;
    int64_t i, at = idle->first[stage], end = idle->first[stage + 1];

    json_string_open(t->w, "gaps");
    for (i = s->first[stage]; i < s->first[stage + 1]; i++) {
        int n = 0;
        if (!is_pass(t, i)) continue;
        for (; at < end && idle->pieces[at].before == i; at++) n++;
        json_string_put(t->w, (char)('0' + n));
    }
    json_string_put(t->w, (char)('0' + (end - at)));
    json_string_close(t->w);
    json_list_open(t->w, "idle");
    for (at = idle->first[stage]; at < end; at++) {
        json_list_integer(t->w, idle->pieces[at].cause);
        json_list_integer(t->w, ticks(t, idle->pieces[at].end) - ticks(t, idle->pieces[at].start));
    }
    json_list_close(t->w);
}

/* Writes the transfers that wait for an earlier one: the pass, counted on its stage, and the ticks from its end. */
static void write_queued(const stream *t, int64_t stage) {
    const cf_schedule *s = t->s->schedule;
    int64_t i, n = 0;

    json_list_open(t->w, "queued");
    for (i = s->first[stage]; i < s->first[stage + 1]; i++) {
        if (!is_pass(t, i)) continue;
        if (t->s->idle.sent[i] > t->s->timeline->end[i]) {
            json_list_integer(t->w, n);
            json_list_integer(t->w, ticks(t, t->s->idle.sent[i]) - ticks(t, t->s->timeline->end[i]));
        }
        n++;
    }
    json_list_close(t->w);
}

/* Writes the critical path: the stage, and the pass counted on it. */
static void write_path(const stream *t) {
    const cf_schedule *s = t->s->schedule;
    int64_t i;

    json_list_open(t->w, "path");
    for (i = 0; i < t->s->idle.n_path; i++) {
        int64_t id = t->s->idle.path[i], n = 0, j;
        int64_t stage = cf_placement_stage(s->shape.placement, s->shape.n_stages, s->actions[id].stage);
        if (!s->lowered) n = id - s->first[stage];
        else
            for (j = s->first[stage]; j < id; j++) n += is_pass(t, j);
        json_list_integer(t->w, stage);
        json_list_integer(t->w, n);
    }
    json_list_close(t->w);
}

static void write_passes(const stream *t) {
    int64_t stage;

    json_number_member(t->w, "tick", t->tick);
    json_integer_member(t->w, "held_unit", t->unit);
    json_open(t->w, "stages", '[');
    for (stage = 0; stage < t->s->schedule->shape.n_stages; stage++) {
        json_open(t->w, NULL, '{');
        write_letters(t, stage);
        write_bindings(t, stage);
        write_members(t, stage);
        write_held(t, stage);
        write_idle(t, stage);
        write_queued(t, stage);
        json_close(t->w, '}');
    }
    json_close(t->w, ']');
    write_path(t);
}

/* ----------------------------------------------------------------------------------------------------------------
   A schedule's numbers
   ---------------------------------------------------------------------------------------------------------------- */

static void write_kind(json_writer *w, const report_schedule *s) {
    json_text_member(w, "name", s->name);
    json_text_member(w, "kind", cf_schedule_kind_name(s->schedule->kind));
    json_integer_member(w, "plan", s->plan);
    json_bool_member(w, "unsplit", s->unsplit);
    json_bool_member(w, "measured", s->measured);
    json_bool_member(w, "fits", s->fits);
    json_bool_member(w, "held_down", s->held_down);
    json_integer_member(w, "k", s->schedule->shape.k);
    json_text_member(w, "replay", cf_replay_name(s->schedule->shape.replay));
    json_integer_member(w, "virtual_stages", s->schedule->shape.n_virtual);
    json_text_member(w, "placement", cf_placement_name(s->schedule->shape.placement));
    json_number_member(w, "latency", s->timing.latency);
    json_number_member(w, "seconds_per_token", s->timing.seconds_per_token);
}

static void write_times(json_writer *w, const cf_timeline *timeline) {
    int64_t i;

    json_number_member(w, "makespan", timeline->makespan);
    json_number_member(w, "busy", timeline->busy);
    json_number_member(w, "replayed", timeline->replayed);
    json_number_member(w, "bubble_useful", timeline->bubble_useful);
    json_number_member(w, "bubble_busy", timeline->bubble_busy);
    json_integer_member(w, "stream_waits", timeline->stream_waits);
    json_number_member(w, "stream_seconds", timeline->stream_seconds);
    json_open(w, "bounds", '{');
    for (i = 0; i < timeline->n_bounds; i++)
        json_number_member(w, timeline->bounds[i].name, timeline->bounds[i].value);
    json_close(w, '}');
}

static void write_memory(json_writer *w, const report_schedule *s) {
    int64_t stage;

    json_text_member(w, "recompute", cf_recompute_name(s->recompute));
    json_integer_member(w, "offload", s->offload);
    json_integer_member(w, "fullest", s->fullest);
    json_open(w, "memory", '[');
    for (stage = 0; stage < s->schedule->shape.n_stages; stage++) {
        json_open(w, NULL, '{');
        modelling_write_terms(w, &s->memory[stage]);
        json_integer_member(w, "total", s->memory[stage].total);
        json_close(w, '}');
    }
    json_close(w, ']');
}

/* Writes idle time by stage and cause. A stage's numbers and the time of its passes add up to the makespan. */
static void write_causes(json_writer *w, const report_schedule *s) {
    int64_t stage;
    int cause;

    json_open(w, "idle", '[');
    for (stage = 0; stage < s->schedule->shape.n_stages; stage++) {
        json_list_open(w, NULL);
        for (cause = 0; cause < IDLE_CAUSE_COUNT; cause++) json_list_number(w, s->idle.stages[stage].seconds[cause]);
        json_list_close(w);
    }
    json_close(w, ']');
}

static int64_t count_passes(const cf_schedule *schedule) {
    int64_t i, n = 0;
    for (i = 0; i < schedule->n_actions; i++) n += schedule->actions[i].pass < CF_COMPUTE_PASS_COUNT;
    return n;
}

static void write_schedule(json_writer *w, const report *r, const report_schedule *s) {
    int64_t n_passes = count_passes(s->schedule), n_stages = s->schedule->shape.n_stages;
    pipeline pipe = *r->pipe;
    pipeline_speed speed;
    stream t;

    json_open(w, NULL, '{');
    write_kind(w, s);
    write_times(w, s->timeline);
    if (r->runs[s - r->schedules].in_step > 0)
        json_number_member(w, "in_step", r->runs[s - r->schedules].in_step);
    json_integer_member(w, "n_passes", n_passes);
    json_integers_member(w, "peak_live", s->timeline->peak_live, n_stages);
    if (s->timeline->peak_tokens) json_integers_member(w, "peak_tokens", s->timeline->peak_tokens, n_stages);
    json_integers_member(w, "peak_state_tokens", s->timeline->peak_state_tokens, n_stages);
    pipe.rank = s->schedule->shape.rank;
    pipe.every_rank = r->slowest;
    speed = pipeline_speed_of(&pipe, r->plans[s->plan].plan, report_seconds(r, s));
    if (r->pipe->has_model && !r->pipe->unit_cost) pipeline_write_speed(w, &speed);
    if (s->schedule->limits.chunks_by_stage)
        json_integers_member(w, "limits", s->schedule->limits.chunks_by_stage, n_stages);
    if (s->memory) write_memory(w, s);
    write_causes(w, s);
    if (n_passes <= REPORT_MOST_PASSES) {
        t.w = w;
        t.s = s;
        t.tick = tick_of(s->timeline);
        t.unit = unit_of(s);
        write_passes(&t);
    }
    json_close(w, '}');
}

/* ----------------------------------------------------------------------------------------------------------------
   The rest
   ---------------------------------------------------------------------------------------------------------------- */

static void write_setting(json_writer *w, const report *r) {
    const cf_plan *plan = r->packed->plan;
    int64_t limit = r->pipe->gpu_bytes > 0 ? r->pipe->gpu_bytes : r->pipe->limit_bytes;
    cf_plan_stats stats;

    cf_plan_measure(plan, NULL, &stats);
    json_text_member(w, "source", cli_base_name(r->packed->list.path));
    if (r->part[0]) json_text_member(w, "part", r->part);
    json_integer_member(w, "n_sequences", plan->n_sequences);
    json_integer_member(w, "n_empty", plan->n_empty);
    json_integer_member(w, "n_tokens", plan->n_tokens);
    json_integer_member(w, "longest_sequence", stats.longest_sequence);
    json_integer_member(w, "chunk_size", plan->chunk_size);
    json_integer_member(w, "k", r->k);
    if (r->k_words) json_text_member(w, "k_default", r->k_words);
    json_integer_member(w, "n_stages", r->pipe->n_stages);
    json_integer_member(w, "rank", r->pipe->rank);
    json_bool_member(w, "slowest", r->slowest);
    json_text_member(w, "rank_words", report_rank_words(r));
    json_integer_member(w, "n_ranks", plan->n_ranks);
    json_text_member(w, "unit", r->pipe->unit_cost ? "token times" : "s");
    json_bool_member(w, "estimated", !r->pipe->unit_cost);
    json_text_member(w, "held", held_unit_of(r->pipe) == HELD_TOKENS ? "tokens" : "bytes");
    if (limit > 0) json_integer_member(w, "limit_bytes", limit);
    if (r->pipe->has_model) modelling_write(w, &r->pipe->model);
    if (!r->pipe->estimates) return;
    json_text_member(w, "gpu", r->pipe->gpu.name);
    json_number_member(w, "launch_seconds", r->pipe->gpu.launch);
    json_text_member(w, "launch_hint", modelling_launch_hint(&r->pipe->asked->gpu));
    json_integer_member(w, "gpu_memory", r->pipe->gpu.memory);
}

void report_write_term_names(json_writer *w) {
    json_open(w, "terms", '{');
#define WRITE_TERM(name, words) json_text_member(w, #name, words);
    CF_MEMORY_TERMS(WRITE_TERM)
#undef WRITE_TERM
    json_close(w, '}');
}

static void write_words(json_writer *w, const report *r) {
    char text[1024];
    int i;

    report_sentence(r, text, sizeof text);
    json_text_member(w, "sentence", text);
    if (r->context.best.status == CF_TUNE_OK) {
        baseline_context_words(&r->context, text, sizeof text);
        json_text_member(w, "context_words", text);
        baseline_write(w, "context_baseline", &r->context);
    }
    if (report_do(r, text, sizeof text)) json_text_member(w, "do", text);
    json_open(w, "advice", '[');
    for (i = 0; report_advice(r, i, text, sizeof text); i++) json_text_member(w, NULL, text);
    json_close(w, ']');
    json_open(w, "causes", '[');
    for (i = 0; i < IDLE_CAUSE_COUNT; i++) json_text_member(w, NULL, idle_cause_name((idle_cause)i));
    json_close(w, ']');
    report_write_term_names(w);
}

static void write_tries(json_writer *w, const report *r) {
    int i;

    json_open(w, "tried", '[');
    for (i = 0; i < r->n_tries; i++) {
        json_open(w, NULL, '{');
        json_text_member(w, "options", r->tries[i].options);
        json_number_member(w, "makespan", r->tries[i].makespan);
        json_integer_member(w, "memory", r->tries[i].memory);
        json_bool_member(w, "fits", r->tries[i].fits);
        json_bool_member(w, "pays", r->tries[i].pays);
        json_close(w, '}');
    }
    json_close(w, ']');
}

static void write_ranks(json_writer *w, const report *r) {
    int64_t i;

    json_text_member(w, "rank_schedule", r->rank_schedule);
    json_open(w, "ranks", '[');
    for (i = 0; i < r->n_ranks; i++) {
        const report_rank *rank = &r->ranks[i];
        json_open(w, NULL, '{');
        json_integer_member(w, "tokens", rank->tokens);
        json_integer_member(w, "pairs", rank->pairs);
        json_integer_member(w, "chunks", rank->n_chunks);
        if (rank->makespan >= 0) {
            json_number_member(w, "makespan", rank->makespan);
            json_number_member(w, "bubble_useful", rank->bubble_useful);
        }
        if (rank->memory > 0) json_integer_member(w, "memory", rank->memory);
        json_close(w, '}');
    }
    json_close(w, ']');
}

static void write_errors(json_writer *w, const report *r) {
    int pass;

    json_integer_member(w, "predicted", r->predicted);
    json_integer_member(w, "measured", r->measured);
    json_open(w, "errors", '[');
    for (pass = 0; pass < CF_COMPUTE_PASS_COUNT; pass++) {
        const report_error *e = &r->errors[pass];
        if (e->n == 0) continue;
        json_open(w, NULL, '{');
        json_text_member(w, "pass", cf_pass_name((cf_pass)pass));
        json_integer_member(w, "n", e->n);
        json_number_member(w, "predicted", e->predicted);
        json_number_member(w, "measured", e->measured);
        json_number_member(w, "off", e->off);
        json_close(w, '}');
    }
    json_close(w, ']');
}

/* Returns the rank whose chunks of a plan are shown: that of the plan's schedules. */
static int64_t rank_of(const report *r, int plan) {
    int i;

    for (i = 0; i < r->n_schedules; i++)
        if (r->schedules[i].plan == plan) return r->schedules[i].schedule->shape.rank;
    return r->pipe->rank;
}

void report_write_json(const report *r, cli_output *to) {
    json_writer w;
    int i;

    json_write_begin(&w, to, "chunkflow-report");
    write_setting(&w, r);
    write_words(&w, r);
    write_lengths(&w, r->packed);
    json_open(&w, "plans", '[');
    for (i = 0; i < r->n_plans; i++) write_plan(&w, &r->plans[i], rank_of(r, i));
    json_close(&w, ']');
    json_integer_member(&w, "baseline", r->baseline);
    json_integer_member(&w, "best", r->best);
    json_open(&w, "schedules", '[');
    for (i = 0; i < r->n_schedules; i++) write_schedule(&w, r, &r->schedules[i]);
    json_close(&w, ']');
    write_tries(&w, r);
    if (r->ranks) write_ranks(&w, r);
    if (r->measured >= 0) write_errors(&w, r);
    json_write_end(&w);
}

/* ----------------------------------------------------------------------------------------------------------------
   The page
   ---------------------------------------------------------------------------------------------------------------- */

static void write_lines(const char *const *lines, cli_output *to) {
    for (; *lines; lines++) (void)cli_write(*lines, strlen(*lines), to);
}

void report_write_page(const report_data parts[REPORT_PAGE_PARTS], cli_output *to) {
    int i;

    for (i = 0; i < REPORT_PAGE_PARTS; i++) {
        write_lines(report_page_pieces[i], to);
        if (parts[i].write) parts[i].write(parts[i].of, to);
        else (void)cli_write("null\n", 5, to);
    }
    write_lines(report_page_pieces[i], to);
}

static void write_data(const void *of, cli_output *to) { report_write_json((const report *)of, to); }

void report_write_report(const report *r, cli_output *to) {
    report_data parts[REPORT_PAGE_PARTS] = {{0}};

    parts[REPORT_PAGE_REPORT].write = write_data;
    parts[REPORT_PAGE_REPORT].of = r;
    report_write_page(parts, to);
}
