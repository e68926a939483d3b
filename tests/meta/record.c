/* record.c - writes down what the library does with seeded inputs, so that two versions of it can be compared.

       make build/record
       record [FIRST COUNT]    cases FIRST .. FIRST + COUNT - 1 (0 2000), one line for each thing made
       record --full CASE      everything of one case in full
       record --hash COUNT     one number over plans, schedules and timelines of so many cases

   A line is "CASE NAME ok HASH" or "CASE NAME CODE field=... item=...", so diff shows which case and what of it
   differs. The wording of errors is in lines of its own, "CASE text:NAME ..."; grep -v ' text:' leaves them out. A case
   depends on its number only, and each part of it draws from a row of its own, so that one difference does not spread.

   RECORD_HASH_ONLY leaves out all but --hash, which needs no other file than the header. RECORD_TUNE_HEADER: cost
   fits, estimates and the tuner are in tools/chunkflow_tune.h; RECORD_NO_TUNE: they are left out.

   The record must not depend on the compiler either: no two draws in one expression, no sums of doubles, and divisions
   by powers of two only. */

#define CHUNKFLOW_IMPLEMENTATION
#include "chunkflow.h"
#ifndef RECORD_HASH_ONLY
#include "tools/command/graph_dot.h"
#include "tools/command/schedule_csv.h"
#endif

#if defined(RECORD_TUNE_HEADER) && !defined(RECORD_HASH_ONLY)
#define CHUNKFLOW_TUNE_IMPLEMENTATION
#include "tools/chunkflow_tune.h"
#endif

#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define MOST_LENGTHS 300
#define MOST_STAGES 64 /* entries of every array by stage, past the largest number of virtual stages that is drawn */

/* ---- random numbers ---- */

static uint64_t random_state;

static uint64_t mix(uint64_t x) {
    x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9u;
    x = (x ^ x >> 27) * 0x94d049bb133111ebu;
    return x ^ x >> 31;
}

static uint64_t draw(void) { return mix(random_state += 0x9e3779b97f4a7c15u); }

static int64_t between(int64_t low, int64_t high) { return low + (int64_t)(draw() % (uint64_t)(high - low + 1)); }

static int one_in(int64_t n) { return between(1, n) == 1; }

/* Less than `scale`, with all bits of a double in use, so that sums of it round. */
static double real_below(double scale) { return (double)(draw() >> 11) / 9007199254740992.0 * scale; }

/* ---- the record ---- */

#define UNTOUCHED 4711 /* in error.got, which only a failure may write */

#define EMPTY 0xcbf29ce484222325u /* the hash of nothing */

static struct {
    int case_id;
    char name[80];
    char note[80];
    uint64_t hash;
    uint64_t all;
    int full;
    int quiet;
} record;

/* Every part of a case has a row of random numbers of its own. */
static void begin_part(uint64_t part) { random_state = mix((uint64_t)record.case_id * 64 + part + 1); }

static void begin(const char *format, ...) {
    va_list list;
    va_start(list, format);
    vsnprintf(record.name, sizeof record.name, format, list);
    va_end(list);
    record.note[0] = 0;
    record.hash = EMPTY;
    if (record.full) printf("---- %s", record.name);
}

static void add(uint64_t x) { record.hash = mix((record.hash ^ x) * 0x100000001b3u + 1); }

static void row(const char *label, int64_t index) {
    add((uint64_t)index);
    if (record.full) printf("\n  %s %lld:", label, (long long)index);
}

static void number(const char *label, int64_t value) {
    add((uint64_t)value);
    if (record.full) printf(" %s=%lld", label, (long long)value);
}

static void real(const char *label, double value) {
    uint64_t bits;
    memcpy(&bits, &value, sizeof bits);
    add(bits);
    if (record.full) printf(" %s=%a", label, value);
}

static void text(const char *label, const char *value) {
    const char *c = value ? value : "(null)";
    if (record.full) printf(" %s=\"%s\"", label, c);
    do add((unsigned char)*c);
    while (*c++);
}

static void note_real(const char *label, double value) {
    size_t used = strlen(record.note);
    snprintf(record.note + used, sizeof record.note - used, " %s=%a", label, value);
}

static cf_error no_error(void) {
    cf_error error;
    memset(&error, 0, sizeof error);
    error.got = UNTOUCHED;
    return error;
}

static void finish(cf_result code, const cf_error *error) {
    record.all = mix(record.all ^ record.hash) + (uint64_t)code;
    if (record.quiet) return;
    if (record.full) printf("\n");
    if (code == CF_OK) {
        if (error && error->got != UNTOUCHED) snprintf(record.note, sizeof record.note, " ERROR RECORD TOUCHED");
        printf("%d %s ok %016llx%s\n", record.case_id, record.name, (unsigned long long)record.hash, record.note);
        return;
    }
    if (record.hash != EMPTY) snprintf(record.note, sizeof record.note, " %016llx", (unsigned long long)record.hash);
    printf("%d %s %s field=%s item=%lld%s%s\n", record.case_id, record.name, cf_result_name(code),
           error->field ? error->field : "(null)", (long long)error->item, record.note,
           error->code == code ? "" : " OTHER CODE IN RECORD");
    printf("%d text:%s wanted=%lld got=%lld %s\n", record.case_id, record.name, (long long)error->wanted,
           (long long)error->got, error->text);
}

/* ---- cases ---- */

typedef struct batch {
    int64_t lengths[MOST_LENGTHS];
    int64_t n;
    cf_pack_desc pack;
    cf_timing timing;
    cf_stage_cost stages[MOST_STAGES];
    cf_schedule_desc schedule; /* kind, report and n_virtual aside */
    int64_t n_virtual;         /* of the kinds that take several */
    int64_t limits[MOST_STAGES];
    int64_t limits_bytes[MOST_STAGES];
} batch;

/* Dearer for late tokens, and exact. */
static double slice_cost(int64_t begin_at, int64_t length, void *user) {
    (void)user;
    return (double)(length * 64 + length * (begin_at % 1048576) / 16);
}

static cf_pass_cost draw_cost(void) {
    cf_pass_cost cost;
    memset(&cost, 0, sizeof cost);
    if (!one_in(3)) cost.per_token = real_below(0.0078125);
    if (one_in(2)) cost.constant = real_below(2);
    if (one_in(2)) cost.per_pair = real_below(0.0000152587890625);
    if (one_in(5)) cost.constant = (double)between(1, 5);
    return cost;
}

static cf_stage_cost draw_stage_cost(void) {
    cf_stage_cost cost;
    memset(&cost, 0, sizeof cost);
    cost.forward = draw_cost();
    if (cost.forward.constant + cost.forward.per_token + cost.forward.per_pair <= 0) cost.forward.per_token = 1;
    if (one_in(2)) cost.backward = draw_cost();
    if (one_in(4)) cost.replay = draw_cost();
    if (one_in(3)) {
        cost.input = draw_cost();
        cost.weight = draw_cost();
    }
    return cost;
}

static void draw_timing(batch *b) {
    int64_t i;
    memset(&b->timing, 0, sizeof b->timing);
    if (!one_in(3)) b->timing.all = draw_stage_cost();
    for (i = 0; i < MOST_STAGES; i++) b->stages[i] = draw_stage_cost();
    if (one_in(4)) b->timing.stages = b->stages;
    if (one_in(2)) b->timing.latency = one_in(2) ? real_below(3) : (double)between(1, 4);
    if (one_in(3)) b->timing.seconds_per_token = real_below(0.015625);
    if (one_in(2)) b->timing.offload_seconds_per_token = real_below(0.0078125);
    b->timing.no_overlap = one_in(3);
    if (!one_in(3)) return;
    b->timing.stream_forward = real_below(0.03125);
    b->timing.stream_backward = real_below(0.125);
    b->timing.stream_exposed = real_below(1);
}

static void draw_pack(batch *b) {
    static const int64_t sizes[] = {1, 5, 16, 64, 100, 256, 1000, 1024, 4096, 6144};
    cf_pack_desc *pack = &b->pack;
    memset(pack, 0, sizeof *pack);
    pack->chunk_size = sizes[between(0, 9)];
    if (one_in(3)) {
        pack->align = between(1, 64);
        pack->chunk_size = pack->align * between(1, 32);
    }
    pack->method = (cf_pack_method)between(0, 3);
    pack->split = (cf_split_method)between(0, 3);
    pack->no_tails = one_in(4);
    if (one_in(4)) pack->max_slices = between(1, 6);
    if (one_in(2)) pack->n_ranks = between(1, 5);
    if (one_in(3)) pack->cost = draw_cost();
    if (one_in(6)) pack->slice_cost = slice_cost;
}

static int64_t draw_length(int64_t size, int64_t style) {
    int64_t length;
    switch (style) {
        case 0: return between(0, size);
        case 1: return one_in(6) ? between(size, 6 * size) : between(0, size);
        case 2: return between(size + 1, 8 * size);
        case 3: length = between(0, 4) * size; return length + (length ? between(-1, 1) : 0);
        default: return one_in(60) ? between(size, 5 * size) : between(0, size / 3 + 1);
    }
}

static void draw_lengths(batch *b) {
    static const int64_t most[] = {12, 36, 6, 12, MOST_LENGTHS};
    int64_t style = between(0, 4), size, i;
    if (one_in(40)) b->pack.chunk_size = CF_MAX_CHUNK_SIZE; /* pairs near the end of 64 bits */
    if (b->pack.align) b->pack.chunk_size -= b->pack.chunk_size % b->pack.align;
    size = b->pack.chunk_size;
    b->n = between(1, most[style]);
    if (one_in(50)) b->n = 0;
    for (i = 0; i < b->n; i++) b->lengths[i] = draw_length(size, style);
    if (b->n && one_in(8)) {
        i = between(0, b->n - 1);
        b->lengths[i] = between(8 * size, 14 * size);
    }
}

static void draw_limits(batch *b) {
    cf_schedule_desc *desc = &b->schedule;
    int64_t style = between(0, 7), size = b->pack.chunk_size, i;
    if (style >= 6 || one_in(4)) {
        desc->bytes.per_token_activations = between(1, 40);
        desc->bytes.per_token_state = between(0, 10);
        desc->bytes.per_token_state_gradient = between(0, 10);
        desc->bytes.per_token_boundary = between(0, 4);
    }
    for (i = 0; i < MOST_STAGES; i++) {
        b->limits[i] = between(1, 9);
        b->limits_bytes[i] = between(10, 500) * size;
    }
    if (style == 0) desc->limit = CF_NO_LIMIT; /* 1 and 2: what holds by default */
    if (style == 3 || style == 4) desc->limit = between(1, 9);
    if (style == 5) desc->limits = b->limits;
    if (style == 6) desc->limit_bytes = between(10, 500) * size;
    if (style == 7) desc->limits_bytes = b->limits_bytes;
}

static void draw_schedule(batch *b) {
    cf_schedule_desc *desc = &b->schedule;
    memset(desc, 0, sizeof *desc);
    desc->n_stages = one_in(8) ? between(6, 8) : between(0, 5);
    desc->replay = one_in(3) ? CF_REPLAY_LOCAL : CF_REPLAY_PIPELINE;
    desc->k = between(0, 5);
    desc->rank = between(0, (b->pack.n_ranks ? b->pack.n_ranks : 1) - 1);
    desc->split_backward = one_in(2);
    desc->budget = one_in(6) ? between(40, 120) : between(1, 30);
    if (!one_in(4)) desc->timing = &b->timing;
    b->n_virtual = between(0, 3);
    draw_limits(b);
}

static void draw_batch(batch *b) {
    begin_part(0);
    memset(b, 0, sizeof *b);
    draw_pack(b);
    draw_lengths(b);
    draw_timing(b);
    draw_schedule(b);
}

/* ---- plans, schedules, timelines ---- */

static void add_plan_head(const cf_plan *p) {
    row("plan", p->chunk_size);
    number("align", p->align);
    number("max_slices", p->max_slices);
    number("method", (int64_t)p->method);
    number("split", (int64_t)p->split);
    number("n_sequences", p->n_sequences);
    number("n_empty", p->n_empty);
    number("n_tokens", p->n_tokens);
    number("n_ranks", p->n_ranks);
    number("n_steps", p->n_steps);
    number("n_chunks", p->n_chunks);
    number("n_idle", p->n_idle);
    number("n_groups", p->n_groups);
    number("n_slices", p->n_slices);
    number("lower_bound", p->lower_bound);
}

static void add_plan(const cf_plan *p) {
    int64_t i;
    add_plan_head(p);
    for (i = 0; i < p->n_chunks; i++) {
        const cf_chunk *c = &p->chunks[i];
        row("chunk", i);
        number("first_slice", c->first_slice);
        number("n_slices", c->n_slices);
        number("tokens", c->tokens);
        number("padded", c->padded);
        number("pairs", c->pairs);
        number("group", c->group);
        number("index", c->index);
        number("prefix", c->prefix);
        number("rank", c->rank);
    }
    for (i = 0; i < p->n_slices; i++) {
        row("slice", i);
        number("sequence", p->slices[i].sequence);
        number("begin", p->slices[i].begin);
        number("length", p->slices[i].length);
        number("offset", p->slices[i].offset);
    }
    for (i = 0; i < p->n_groups; i++) {
        row("group", i);
        number("sequence", p->groups[i].sequence);
        number("first_chunk", p->groups[i].first_chunk);
        number("n_chunks", p->groups[i].n_chunks);
        number("tokens", p->groups[i].tokens);
    }
}

static void add_action(const cf_action *a) {
    number("chunk", a->chunk);
    number("stage", a->stage);
    if (record.full) printf(" %s", cf_pass_name((cf_pass)a->pass));
    number("pass", a->pass);
    number("keep", a->keep);
    number("reserved", a->reserved);
}

static void add_schedule(const cf_schedule *s) {
    int64_t i;
    row("schedule", (int64_t)s->kind);
    number("replay", (int64_t)s->replay);
    number("n_stages", s->n_stages);
    number("n_virtual", s->n_virtual);
    number("k", s->k);
    number("rank", s->rank);
    number("n_chunks", s->n_chunks);
    number("n_actions", s->n_actions);
    number("lowered", s->lowered);
    for (i = 0; i <= s->n_stages; i++) {
        row("first", i);
        number("at", s->first[i]);
    }
    for (i = 0; s->limits && i < s->n_stages; i++) {
        row("limit", i);
        number("chunks", s->limits[i]);
    }
    for (i = 0; i < s->n_actions; i++) {
        row("action", i);
        add_action(&s->actions[i]);
    }
}

static void add_report(const cf_search_report *r) {
    row("report", r->budget);
    number("n_tried", r->n_tried);
    number("n_improved", r->n_improved);
    number("best_fixed", (int64_t)r->best_fixed);
    real("fixed_makespan", r->fixed_makespan);
    real("makespan", r->makespan);
    real("bound", r->bound);
    real("gap", r->gap);
    number("runs_ahead", r->runs_ahead);
}

/* Of the first n actions. */
static void add_times(const cf_timeline *t, int64_t n) {
    int64_t i;
    for (i = 0; i < n; i++) {
        row("time", i);
        real("start", t->start[i]);
        real("end", t->end[i]);
        number("live", t->live[i]);
    }
}

static void add_timeline(const cf_timeline *t) {
    int64_t i;
    row("timeline", t->n_actions);
    number("n_stages", t->n_stages);
    real("makespan", t->makespan);
    real("busy", t->busy);
    real("replayed", t->replayed);
    real("bubble_useful", t->bubble_useful);
    real("bubble_busy", t->bubble_busy);
    number("stream_waits", t->stream_waits);
    real("stream_seconds", t->stream_seconds);
    add_times(t, t->n_actions);
    for (i = 0; i < t->n_stages; i++) {
        row("peak", i);
        number("live", t->peak_live[i]);
        number("tokens", t->peak_tokens[i]);
        number("state_tokens", t->peak_state_tokens[i]);
        number("bytes", t->peak_bytes[i]);
    }
}

static void add_bounds(const cf_timeline *t) {
    int64_t i;
    row("bounds", t->n_bounds);
    real("bound", t->bound);
    for (i = 0; i < t->n_bounds; i++) {
        row("bound", i);
        text("name", t->bounds[i].name);
        real("value", t->bounds[i].value);
    }
    note_real("bound", t->bound);
}

static cf_plan *record_plan(const batch *b) {
    cf_plan *plan = NULL;
    cf_error error = no_error();
    cf_result code = cf_pack(b->lengths, b->n, &b->pack, &plan, &error);
    begin("plan");
    if (code == CF_OK) add_plan(plan);
    finish(code, &error);
    return plan;
}

/* The timeline of a schedule, in two lines: what happens, and the bounds. */
static cf_timeline *record_timeline(const batch *b, const cf_plan *plan, const cf_schedule *schedule,
                                    const char *name) {
    cf_simulate_desc desc;
    cf_timeline *timeline = NULL;
    cf_error error = no_error();
    cf_result code;
    memset(&desc, 0, sizeof desc);
    desc.timing = b->schedule.timing;
    desc.bytes = b->schedule.bytes;
    desc.limit = b->schedule.limit;
    desc.limits = b->schedule.limits;
    code = cf_simulate(plan, schedule, &desc, &timeline, &error);
    begin("timeline.%s", name);
    if (code == CF_OK) {
        add_timeline(timeline);
        note_real("makespan", timeline->makespan);
    }
    finish(code, &error);
    if (code != CF_OK) return NULL;
    begin("bounds.%s", name);
    add_bounds(timeline);
    finish(CF_OK, NULL);
    return timeline;
}

static cf_schedule *record_schedule(const batch *b, const cf_plan *plan, cf_schedule_kind kind, const char *name,
                                    int64_t *wanted) {
    cf_schedule_desc desc = b->schedule;
    cf_search_report report;
    cf_schedule *schedule = NULL;
    cf_error error = no_error();
    cf_result code;
    desc.kind = kind;
    desc.report = &report;
    if (kind == CF_SCHEDULE_INTERLEAVED || kind == CF_SCHEDULE_BEST) desc.n_virtual = b->n_virtual;
    memset(&report, 0, sizeof report);
    code = cf_schedule_make(plan, &desc, &schedule, &error);
    begin("schedule.%s", name);
    if (code == CF_OK) add_schedule(schedule);
    if (code == CF_OK && (kind == CF_SCHEDULE_BEST || kind == CF_SCHEDULE_PAPER)) add_report(&report);
    finish(code, &error);
    if (wanted) *wanted = code == CF_ERROR_INFEASIBLE && b->schedule.limit > 0 ? error.wanted : 0;
    return schedule;
}

/* Under a limit that is too low, the least that would do is tried as well. */
static cf_schedule *record_kind(const batch *b, const cf_plan *plan, cf_schedule_kind kind) {
    char name[40];
    int64_t wanted = 0;
    cf_schedule *schedule;
    snprintf(name, sizeof name, "%s", cf_schedule_kind_name(kind));
    schedule = record_schedule(b, plan, kind, name, &wanted);
    if (!schedule && wanted > 0) {
        batch wider = *b;
        wider.schedule.limit = wanted;
        snprintf(name, sizeof name, "%s-least", cf_schedule_kind_name(kind));
        schedule = record_schedule(&wider, plan, kind, name, NULL);
    }
    if (schedule) cf_timeline_free(record_timeline(b, plan, schedule, name));
    return schedule;
}

/* Plan, schedules of all kinds and their timelines; returns one of the schedules for whatever else is done with it. */
static cf_schedule *record_schedules(const batch *b, const cf_plan *plan) {
    int kind, chosen = CF_SCHEDULE_PAPER + record.case_id % CF_SCHEDULE_BEST;
    cf_schedule *result = NULL;
    for (kind = CF_SCHEDULE_PAPER; kind <= CF_SCHEDULE_BEST; kind++) {
        cf_schedule *schedule = record_kind(b, plan, (cf_schedule_kind)kind);
        if (schedule && (!result || kind == chosen)) {
            cf_schedule_free(result);
            result = schedule;
        } else cf_schedule_free(schedule);
    }
    return result;
}

static void hash_case(void) {
    batch b;
    cf_plan *plan;
    draw_batch(&b);
    plan = record_plan(&b);
    if (plan) cf_schedule_free(record_schedules(&b, plan));
    cf_plan_free(plan);
}

static void hash_cases(int count) {
    record.quiet = 1;
    for (record.case_id = 0; record.case_id < count; record.case_id++) {
        cf_pass_cost cost;
        int64_t tokens, pairs;
        hash_case();
        begin_part(1);
        cost = draw_cost();
        tokens = between(0, 1 << 24);
        pairs = between(0, (int64_t)1 << 40);
        begin("cost");
        real("seconds", cf_cost_seconds(&cost, tokens, pairs));
        finish(CF_OK, NULL);
    }
    printf("%d cases %016llx\n", count, (unsigned long long)record.all);
}

#ifndef RECORD_HASH_ONLY

/* ---- chunks ---- */

static void record_stats(const batch *b, const cf_plan *plan) {
    cf_plan_stats s;
    int64_t i;
    cf_plan_measure(plan, one_in(2) ? &b->pack.cost : NULL, &s);
    begin("stats");
    number("n_standalone", s.n_standalone);
    number("n_dependent", s.n_dependent);
    number("n_hybrid", s.n_hybrid);
    number("n_idle", s.n_idle);
    number("excess", s.excess);
    number("largest_group", s.largest_group);
    number("longest_sequence", s.longest_sequence);
    number("most_slices", s.most_slices);
    real("fill", s.fill);
    real("pairs", s.pairs);
    real("chunk_cost_spread", s.chunk_cost_spread);
    real("rank_token_spread", s.rank_token_spread);
    real("rank_pair_spread", s.rank_pair_spread);
    for (i = -1; i <= plan->n_chunks; i++) number("state_tokens", cf_chunk_state_tokens(plan, i));
    finish(CF_OK, NULL);
}

static void record_plan_checks(const batch *b, const cf_plan *plan) {
    cf_error error = no_error();
    cf_result code = cf_plan_validate(plan, b->lengths, b->n, NULL, &error);
    size_t bytes = 0;
    void *memory;
    cf_plan *again = NULL;
    begin("plan-validate");
    finish(code, &error);
    error = no_error();
    code = cf_pack_size(b->lengths, b->n, &b->pack, &bytes, &error);
    memory = malloc(bytes ? bytes : 1);
    if (code == CF_OK) code = cf_pack_into(b->lengths, b->n, &b->pack, memory, bytes, &again, &error);
    begin("plan-into");
    if (code == CF_OK) add_plan(again);
    finish(code, &error);
    cf_plan_free(again);
    free(memory);
}

static void add_numbers(const char *label, const int32_t *from, int64_t n) {
    int64_t i;
    for (i = 0; i < n; i++) number(label, from[i]);
}

static void add_metadata(const cf_metadata *m) {
    row("metadata", m->chunk);
    number("n_seqs", m->n_seqs);
    number("tokens", m->tokens);
    number("rows", m->rows);
    number("prefix", m->prefix);
    number("pairs", m->pairs);
    number("max_seqlen_q", m->max_seqlen_q);
    number("max_seqlen_k", m->max_seqlen_k);
    add_numbers("q", m->cu_seqlens_q, m->n_seqs + 1);
    add_numbers("k", m->cu_seqlens_k, m->n_seqs + 1);
    add_numbers("sequences", m->sequence_ids, m->rows);
    add_numbers("positions", m->position_ids, m->rows);
    add_numbers("targets", m->target_positions, m->rows);
}

static void record_metadata(const cf_plan *plan) {
    size_t bytes = 0, one = 0;
    cf_error error = no_error();
    cf_result code;
    void *memory;
    int64_t i;
    if (plan->chunk_size > 100000) return;
    code = cf_metadata_size(plan, -1, NULL, &bytes, &error);
    memory = malloc(bytes ? bytes : 1);
    begin("metadata");
    for (i = 0; code == CF_OK && i < plan->n_chunks; i++) {
        cf_metadata metadata;
        code = cf_metadata_size(plan, i, NULL, &one, &error);
        if (code == CF_OK) code = cf_metadata_fill(plan, i, NULL, memory, one, &metadata, &error);
        if (code == CF_OK) add_metadata(&metadata);
    }
    finish(code, &error);
    free(memory);
}

static void record_chunks(const batch *b, const cf_plan *plan) {
    begin_part(2);
    record_stats(b, plan);
    record_plan_checks(b, plan);
    record_metadata(plan);
}

/* ---- graphs ---- */

static void record_nodes(const cf_graph *g) {
    int64_t i;
    begin("graph.nodes");
    row("graph", g->n_stages);
    number("n_virtual", g->n_virtual);
    number("k", g->k);
    number("replay", (int64_t)g->replay);
    number("split", g->split);
    number("rank", g->rank);
    number("n_steps", g->n_steps);
    number("n_nodes", g->n_nodes);
    for (i = 0; i <= g->n_steps; i++) number("first", g->first[i]);
    for (i = 0; i < g->n_nodes; i++) {
        const cf_node *n = &g->nodes[i];
        row("node", i);
        number("chunk", n->chunk);
        number("stage", n->stage);
        number("pass", n->pass);
        number("keep", n->keep);
        real("seconds", n->seconds);
    }
    finish(CF_OK, NULL);
}

static void record_edges(const cf_graph *g) {
    int64_t i;
    begin("graph.edges");
    row("edges", g->n_edges);
    for (i = 0; i < g->n_edges; i++) {
        row("edge", i);
        number("from", g->edges[i].from);
        number("to", g->edges[i].to);
        number("why", g->edges[i].why);
        real("seconds", g->edges[i].seconds);
        number("out", g->out[i]);
    }
    for (i = 0; i <= g->n_nodes; i++) {
        row("at", i);
        number("first_in", g->first_in[i]);
        number("first_out", g->first_out[i]);
    }
    finish(CF_OK, NULL);
}

static cf_graph_desc draw_graph_desc(const batch *b) {
    cf_graph_desc desc;
    memset(&desc, 0, sizeof desc);
    desc.n_stages = b->schedule.n_stages;
    desc.n_virtual = b->n_virtual;
    desc.k = b->schedule.k;
    desc.replay = b->schedule.replay;
    desc.split = b->schedule.split_backward;
    (void)one_in(3);
    desc.rank = b->schedule.rank;
    desc.timing = b->schedule.timing;
    return desc;
}

static cf_graph *record_graph(const batch *b, const cf_plan *plan) {
    cf_graph_desc desc;
    cf_graph *graph = NULL;
    cf_error error = no_error();
    cf_result code;
    begin_part(3);
    desc = draw_graph_desc(b);
    code = cf_graph_make(plan, &desc, &graph, &error);
    if (code == CF_OK) code = cf_graph_validate(graph, NULL, &error);
    begin("graph");
    finish(code, &error);
    if (code != CF_OK) return graph;
    record_nodes(graph);
    record_edges(graph);
    return graph;
}

/* ---- text ---- */

typedef struct collector {
    char *data;
    size_t used, space;
    int64_t pieces; /* until it refuses with 55; -1: never */
} collector;

static int collect(const char *piece, size_t bytes, void *user) {
    collector *c = (collector *)user;
    if (c->pieces >= 0 && c->pieces-- == 0) return 55;
    if (c->used + bytes + 1 > c->space) {
        c->space = (c->used + bytes + 1) * 2;
        c->data = (char *)realloc(c->data, c->space);
    }
    memcpy(c->data + c->used, piece, bytes);
    c->used += bytes;
    c->data[c->used] = 0;
    return 0;
}

static collector new_collector(void) {
    collector c;
    memset(&c, 0, sizeof c);
    c.pieces = -1;
    return c;
}

static void finish_text(cf_result code, collector *c, const cf_error *error) {
    if (record.full && c->data) printf("\n");
    if (code == CF_OK) text("text", c->data);
    finish(code, error);
    free(c->data);
}

static void record_json(const cf_plan *plan, const cf_schedule *schedule, const cf_timeline *timeline) {
    collector c = new_collector();
    cf_error error = no_error();
    cf_result code = cf_write_plan_json(plan, NULL, collect, &c, &error);
    begin("json.plan");
    finish_text(code, &c, &error);
    c = new_collector();
    error = no_error();
    code = cf_write_schedule_json(schedule, NULL, collect, &c, &error);
    begin("json.schedule");
    finish_text(code, &c, &error);
    if (!timeline) return;
    c = new_collector();
    error = no_error();
    code = cf_write_schedule_json(schedule, timeline, collect, &c, &error);
    begin("json.timeline");
    finish_text(code, &c, &error);
}

static void record_dot(const cf_graph *graph) {
    collector c = new_collector();
    cf_error error = no_error();
    int64_t most = one_in(2) ? 0 : 200;
    cf_result code = graph_dot_write(graph, most, NULL, collect, &c, &error);
    begin("dot");
    finish_text(code, &c, &error);
}

static void record_read(const cf_plan *plan, const schedule_csv_desc *desc, const char *data, size_t bytes,
                        const char *name) {
    cf_schedule *schedule = NULL;
    cf_error error = no_error();
    cf_result code = schedule_csv_read(data, bytes, plan, desc, &schedule, NULL, &error);
    begin("read.%s", name);
    if (code == CF_OK) add_schedule(schedule);
    finish(code, &error);
    cf_schedule_free(schedule);
}

/* The chunk of each microbatch of what is written. */
static int32_t *microbatches_of(const cf_plan *plan, const cf_schedule *schedule) {
    int32_t *chunks = (int32_t *)calloc((size_t)plan->n_steps + 1, sizeof *chunks);
    if (!chunks) abort();
    (void)schedule_csv_microbatches(plan, schedule, chunks, NULL);
    return chunks;
}

static void record_csv(const cf_plan *plan, const cf_schedule *schedule, const char *name) {
    schedule_csv_desc desc;
    collector c = new_collector();
    cf_error error = no_error();
    cf_result code;
    memset(&desc, 0, sizeof desc);
    desc.extensions = !one_in(5);
    desc.format = (schedule_csv_format)between(0, 2);
    desc.torch = (schedule_csv_torch)between(0, 2);
    code = schedule_csv_write(plan, schedule, &desc, collect, &c, &error);
    begin("csv.%s", name);
    if (code == CF_OK) text("text", c.data);
    finish(code, &error);
    desc.format = SCHEDULE_CSV_DEFAULT;
    desc.replay = schedule->replay;
    desc.kind = one_in(2) ? schedule->kind : CF_SCHEDULE_DEFAULT;
    desc.k = one_in(2) ? schedule->k : 0;
    desc.legacy = one_in(6);
    desc.rank = schedule->rank;
    if (code == CF_OK) {
        int32_t *chunks = microbatches_of(plan, schedule);
        desc.chunks = chunks;
        record_read(plan, &desc, c.data, c.used, name);
        free(chunks);
    }
    free(c.data);
}

/* ---- running ---- */

typedef struct watch {
    int64_t fail_at; /* callbacks until one reports an error; -1: never */
} watch;

static int seen(void *user, const char *what, const cf_step *step) {
    watch *w = (watch *)user;
    row(what, step->position);
    add_action(&step->action);
    number("of", step->chunk - step->plan->chunks);
    number("slot", step->slot);
    number("state", step->state);
    number("state_tokens", step->state_tokens);
    number("input", step->input);
    number("output", step->output);
    number("peer", step->peer);
    number("seed", (int64_t)step->seed);
    number("wants_loss", step->wants_loss);
    number("clear", step->clear_state_gradient);
    return w->fail_at >= 0 && w->fail_at-- == 0 ? 77 : 0;
}

static int on_forward(void *user, const cf_step *step) { return seen(user, "forward", step); }
static int on_backward(void *user, const cf_step *step) { return seen(user, "backward", step); }
static int on_send(void *user, const cf_step *step) { return seen(user, "send", step); }
static int on_receive(void *user, const cf_step *step) { return seen(user, "receive", step); }
static int on_offload(void *user, const cf_step *step) { return seen(user, "offload", step); }
static int on_prefetch(void *user, const cf_step *step) { return seen(user, "prefetch", step); }

static void add_slot(const char *what, const cf_slot *slot) {
    row(what, (int64_t)slot->what);
    number("slot", slot->slot);
    number("owner", slot->owner);
    number("stage", slot->stage);
    number("rows", slot->rows);
}

static int on_acquire(void *user, const cf_slot *slot) {
    watch *w = (watch *)user;
    add_slot("acquire", slot);
    return w->fail_at >= 0 && w->fail_at-- == 0 ? 78 : 0;
}

static void on_release(void *user, const cf_slot *slot) {
    (void)user;
    add_slot("release", slot);
}

static int on_progress(void *user, const cf_progress *p) {
    watch *w = (watch *)user;
    row("progress", p->done);
    number("total", p->total);
    number("live_slots", p->live_slots);
    number("live_states", p->live_states);
    number("live_state_tokens", p->live_state_tokens);
    number("live_boundaries", p->live_boundaries);
    return w->fail_at >= 0 && w->fail_at-- == 0 ? 79 : 0;
}

static cf_run_desc run_desc(watch *w) {
    cf_run_desc desc;
    memset(&desc, 0, sizeof desc);
    desc.user = w;
    desc.forward = on_forward;
    desc.backward = on_backward;
    desc.send = on_send;
    desc.receive = on_receive;
    desc.offload = on_offload;
    desc.prefetch = on_prefetch;
    desc.acquire = on_acquire;
    desc.release = on_release;
    desc.progress = on_progress;
    desc.seed = (uint64_t)record.case_id * 3;
    return desc;
}

static void add_run_stats(const cf_run_stats *stats) {
    row("stats", stats->done);
    number("peak_slots", stats->peak_slots);
    number("peak_tokens", stats->peak_tokens);
    number("peak_states", stats->peak_states);
    number("peak_state_tokens", stats->peak_state_tokens);
    number("peak_boundaries", stats->peak_boundaries);
    number("peak_scratch", stats->peak_scratch);
    number("peak_rows", stats->peak_rows);
}

/* All stages, one after the other, from the allocator or from memory of ours. */
static void record_run(const cf_plan *plan, const cf_schedule *schedule, const char *name) {
    watch w = {-1};
    cf_run_desc desc = run_desc(&w);
    cf_run_stats stats;
    cf_error error = no_error();
    cf_result code = CF_OK;
    size_t bytes = 0;
    int64_t stage;
    if (one_in(2) && cf_run_size(plan, schedule, &bytes, NULL) == CF_OK) desc.memory = malloc(bytes);
    desc.bytes = bytes;
    begin("run.%s", name);
    for (stage = 0; code == CF_OK && stage < schedule->n_stages; stage++) {
        memset(&stats, 0, sizeof stats);
        code = cf_run(plan, schedule, stage, &desc, &stats, &error);
        add_run_stats(&stats);
    }
    finish(code, &error);
    free(desc.memory);
}

/* A callback reports an error somewhere; then everything that is in use must be released. */
static void record_broken_run(const cf_plan *plan, const cf_schedule *schedule) {
    watch w = {-1};
    cf_run_desc desc = run_desc(&w);
    cf_run_stats stats;
    cf_error error = no_error();
    cf_result code;
    int64_t stage = between(0, schedule->n_stages - 1);
    w.fail_at = between(0, 40);
    memset(&stats, 0, sizeof stats);
    begin("run.broken");
    code = cf_run(plan, schedule, stage, &desc, &stats, &error);
    add_run_stats(&stats);
    finish(code, &error);
}

static cf_result step_through(cf_runner *runner, int64_t steps, cf_error *error) {
    cf_result code = CF_OK;
    int64_t i;
    for (i = 0; code == CF_OK && i < steps; i++) {
        const cf_action *action = cf_run_peek(runner);
        row("peek", i);
        if (action) add_action(action);
        code = cf_run_next(runner, error);
    }
    return code;
}

static void record_stepped_run(const cf_plan *plan, const cf_schedule *schedule) {
    watch w = {-1};
    cf_run_desc desc = run_desc(&w);
    cf_runner *runner = NULL;
    cf_run_stats stats;
    cf_error error = no_error();
    int64_t stage = between(0, schedule->n_stages - 1);
    int64_t steps = one_in(2) ? CF_MAX_ACTIONS : between(0, 30), length = schedule->n_actions + 2;
    cf_result code = cf_run_open(plan, schedule, stage, &desc, &runner, &error);
    begin("run.stepped");
    if (code == CF_OK) code = step_through(runner, steps < length ? steps : length, &error);
    memset(&stats, 0, sizeof stats);
    number("close", (int64_t)cf_run_close(runner, &stats, NULL));
    add_run_stats(&stats);
    finish(code, &error);
}

/* ---- what else is done with a schedule ---- */

static void record_measured(const batch *b, const cf_plan *plan, const cf_schedule *schedule) {
    size_t n = (size_t)schedule->n_actions + 1;
    double *start = (double *)malloc(2 * n * sizeof *start), *end = start + n;
    cf_timeline *timeline = NULL;
    cf_error error = no_error();
    cf_result code;
    int64_t i;
    for (i = 0; i < schedule->n_actions; i++) {
        start[i] = (double)between(1000, 2000000);
        end[i] = start[i] + (double)between(0, 1000);
    }
    code = cf_timeline_measured(plan, schedule, start, end, one_in(2) ? &b->schedule.bytes : NULL, NULL, &timeline,
                                &error);
    begin("measured");
    if (code == CF_OK) {
        add_timeline(timeline);
        add_bounds(timeline);
    }
    finish(code, &error);
    cf_timeline_free(timeline);
    free(start);
}

static void record_validate(const batch *b, const cf_plan *plan, const cf_schedule *schedule, const char *name) {
    cf_validate_desc desc;
    cf_error error = no_error();
    cf_result code;
    memset(&desc, 0, sizeof desc);
    desc.limit = b->schedule.limit;
    desc.limits = b->schedule.limits;
    desc.bytes = b->schedule.bytes;
    desc.limit_bytes = b->schedule.limit_bytes;
    desc.limits_bytes = b->schedule.limits_bytes;
    if (one_in(4)) desc.limit = between(1, 6); /* which the schedule was not made under */
    code = cf_schedule_validate(plan, schedule, &desc, NULL, &error);
    begin("validate.%s", name);
    finish(code, &error);
}

static void record_lowered(const batch *b, const cf_plan *plan, const cf_schedule *schedule, int offload) {
    const char *name = offload ? "offloaded" : "lowered";
    cf_lower_desc desc;
    cf_schedule *lowered = NULL;
    cf_error error = no_error();
    cf_result code;
    memset(&desc, 0, sizeof desc);
    desc.timing = b->schedule.timing;
    desc.offload = offload;
    code = cf_schedule_lower(plan, schedule, &desc, &lowered, &error);
    begin("schedule.%s", name);
    if (code == CF_OK) add_schedule(lowered);
    finish(code, &error);
    if (code != CF_OK) return;
    cf_timeline_free(record_timeline(b, plan, lowered, name));
    record_validate(b, plan, lowered, name);
    record_run(plan, lowered, name);
    record_csv(plan, lowered, name);
    if (offload) record_measured(b, plan, lowered);
    if (one_in(2)) record_broken_run(plan, lowered);
    cf_schedule_free(lowered);
}

static void record_uses(const batch *b, const cf_plan *plan, const cf_schedule *schedule) {
    cf_timeline *timeline = NULL;
    begin_part(4);
    cf_simulate(plan, schedule, NULL, &timeline, NULL);
    record_validate(b, plan, schedule, "chosen");
    record_measured(b, plan, schedule);
    record_json(plan, schedule, timeline);
    record_csv(plan, schedule, "chosen");
    record_run(plan, schedule, "chosen");
    record_broken_run(plan, schedule);
    record_stepped_run(plan, schedule);
    cf_timeline_free(timeline);
    begin_part(5);
    record_lowered(b, plan, schedule, 0);
    begin_part(6);
    record_lowered(b, plan, schedule, 1);
}

/* ---- models and memory ---- */

static void add_parameters(const cf_parameters *p) {
    number("embedding", p->embedding);
    number("attention", p->attention);
    number("mlp", p->mlp);
    number("norms", p->norms);
    number("head", p->head);
    number("total", p->total);
}

static cf_model draw_model(void) {
    cf_model m;
    int64_t n = 0;
    while (cf_model_at(n)) n++;
    m = *cf_model_at(between(0, n - 1));
    if (one_in(2)) return m;
    m.layers = between(1, 40);
    m.kv_heads = between(1, 4);
    m.heads = m.kv_heads * between(1, 8);
    m.head_dim = one_in(2) ? 0 : between(1, 16) * 8;
    m.hidden = m.heads * between(1, 16) * 8;
    m.ffn = between(1, 64) * 64;
    m.vocab = between(100, 100000);
    m.tied = one_in(2);
    m.qkv_bias = one_in(3);
    m.out_bias = one_in(3);
    m.mlp_bias = one_in(3);
    m.qk_norm = one_in(3);
    m.no_gate = one_in(3);
    return m;
}

static cf_parallel draw_parallel(void) {
    cf_parallel p;
    memset(&p, 0, sizeof p);
    p.tp = (int64_t)1 << between(0, 3);
    if (one_in(2)) p.tp = 0;
    p.pp = between(0, 4);
    p.n_virtual = between(0, 2);
    p.dp = between(0, 4);
    p.zero = between(0, 3);
    p.no_sequence = one_in(3);
    p.recompute = (cf_recompute)between(0, 3);
    if (one_in(3)) p.vocab_multiple = 128;
    return p;
}

static cf_memory_desc draw_memory_desc(const cf_model *model) {
    cf_memory_desc desc;
    memset(&desc, 0, sizeof desc);
    desc.model = model;
    desc.parallel = draw_parallel();
    desc.loss = (cf_loss)between(0, 4);
    desc.unfused = one_in(3);
    desc.unfused_attention = one_in(3);
    if (one_in(3)) desc.activation_bytes = between(1, 4);
    if (one_in(3)) desc.parameter_bytes = between(1, 4);
    if (one_in(3)) desc.gradient_bytes = between(1, 4);
    if (one_in(3)) desc.optimizer_bytes = between(1, 16);
    if (one_in(3)) desc.state_bytes = between(1, 4);
    if (one_in(3)) desc.state_gradient_bytes = between(1, 4);
    if (one_in(3)) desc.runtime_bytes = between(1, 4000000000);
    desc.fragmentation = between(-1, 30);
    if (one_in(3)) desc.state_window = between(1, 20000);
    return desc;
}

static int64_t virtual_stages(const cf_parallel *p) { return (p->pp ? p->pp : 1) * (p->n_virtual ? p->n_virtual : 1); }

static void record_parameters(const cf_model *model, const cf_parallel *parallel) {
    cf_parameters p;
    cf_shard shard;
    cf_error error = no_error();
    cf_result code = cf_model_parameters(model, &p, &error);
    int64_t stage, layers = 0;
    begin("parameters");
    if (code == CF_OK) add_parameters(&p);
    for (stage = 0; code == CF_OK && stage < virtual_stages(parallel); stage++) {
        code = cf_stage_shard(model, parallel, stage, &shard, &error);
        if (code == CF_OK) code = cf_stage_parameters(model, parallel, stage, &p, &error);
        row("stage", stage);
        if (code == CF_OK) layers = shard.layers;
        number("layers", layers);
        if (code == CF_OK) add_parameters(&p);
    }
    finish(code, &error);
}

static void record_token_bytes(const cf_memory_desc *desc) {
    cf_token_bytes t;
    cf_error error = no_error();
    cf_result code = CF_OK;
    int64_t stage;
    begin("token-bytes");
    for (stage = 0; code == CF_OK && stage < virtual_stages(&desc->parallel); stage++) {
        code = cf_memory_token_bytes(desc, stage, &t, &error);
        if (code != CF_OK) break;
        row("stage", stage);
        number("activations", t.activations);
        number("state", t.state);
        number("state_gradient", t.state_gradient);
        number("boundary", t.boundary);
        number("logits", t.logits);
        number("working", t.working);
        number("buffers", t.buffers);
    }
    finish(code, &error);
}

static void draw_loads(cf_memory_load *loads, int64_t n) {
    int64_t i;
    memset(loads, 0, (size_t)n * sizeof *loads);
    for (i = 0; i < n; i++) {
        loads[i].live_tokens = between(0, 100000);
        loads[i].chunk_tokens = between(0, 10000);
        loads[i].state_tokens = between(0, 100000);
        loads[i].state_gradient_tokens = between(0, 100000);
        loads[i].offloaded_tokens = between(0, 100000);
        loads[i].input_tokens = between(0, 10000);
        loads[i].live_scores = between(0, 1000000);
        loads[i].chunk_scores = between(0, 1000000);
    }
}

static void record_estimate(const cf_memory_desc *desc) {
    cf_memory_load loads[MOST_STAGES];
    cf_memory_report reports[MOST_STAGES];
    int64_t n = virtual_stages(&desc->parallel), pp = desc->parallel.pp ? desc->parallel.pp : 1, i;
    cf_error error = no_error();
    cf_result code;
    draw_loads(loads, n);
    code = cf_memory_estimate(desc, loads, n, reports, pp, &error);
    begin("memory");
    for (i = 0; code == CF_OK && i < pp; i++) {
        row("stage", i);
#define ADD_TERM(name, words) number(#name, reports[i].name);
        CF_MEMORY_TERMS(ADD_TERM)
#undef ADD_TERM
        number("total", reports[i].total);
        number("host", reports[i].host);
        number("at_loss", reports[i].at_loss);
    }
    finish(code, &error);
}

static void record_memory(void) {
    cf_model model;
    cf_memory_desc desc;
    begin_part(7);
    model = draw_model();
    desc = draw_memory_desc(&model);
    record_parameters(&model, &desc.parallel);
    record_token_bytes(&desc);
    record_estimate(&desc);
}

/* ---- cost fits, estimates, tuning ---- */

#ifndef RECORD_NO_TUNE

static void add_cost(const char *label, const cf_pass_cost *cost) {
    text("cost", label);
    real("constant", cost->constant);
    real("per_token", cost->per_token);
    real("per_pair", cost->per_pair);
}

static void add_stage_cost(const cf_stage_cost *cost) {
    add_cost("F", &cost->forward);
    add_cost("R", &cost->replay);
    add_cost("B", &cost->backward);
    add_cost("I", &cost->input);
    add_cost("W", &cost->weight);
}

static void draw_samples(cf_sample *samples, int64_t n) {
    int64_t i, passes = between(1, 5);
    for (i = 0; i < n; i++) {
        samples[i].pass = (int)between(0, passes - 1);
        samples[i].rows = between(1, 8192);
        samples[i].pairs = samples[i].rows * between(1, 30000);
        samples[i].seconds = (double)(samples[i].rows * 900 + samples[i].pairs / 16 + between(0, 100000)) / 1048576;
    }
}

static void record_fit(void) {
    cf_sample samples[40];
    cf_stage_cost cost;
    cf_fit fits[CF_COMPUTE_PASS_COUNT];
    cf_error error = no_error();
    cf_result code;
    int64_t n = between(2, 40), i;
    draw_samples(samples, n);
    code = cf_cost_fit(samples, n, &cost, fits, &error);
    begin("fit");
    if (code == CF_OK) add_stage_cost(&cost);
    for (i = 0; code == CF_OK && i < CF_COMPUTE_PASS_COUNT; i++) {
        row("fit", i);
        number("n_samples", fits[i].n_samples);
        real("mean_error", fits[i].mean_error);
        real("mean_absolute", fits[i].mean_absolute);
        real("worst_error", fits[i].worst_error);
        number("worst_sample", fits[i].worst_sample);
    }
    finish(code, &error);
}

static const cf_gpu *draw_gpu(void) {
    int64_t n = 0;
    while (cf_gpu_at(n)) n++;
    return cf_gpu_at(between(0, n - 1));
}

static void record_cost_estimate(void) {
    cf_model model = draw_model();
    cf_cost_desc desc;
    cf_stage_cost stages[MOST_STAGES];
    cf_timing timing;
    double step = 0;
    cf_error error = no_error();
    cf_result code;
    int64_t i, n;
    memset(&desc, 0, sizeof desc);
    desc.model = &model;
    desc.gpu = draw_gpu();
    desc.parallel = draw_parallel();
    desc.gpus_per_node = between(0, 8);
    if (one_in(2)) desc.chunk_size = between(1, 32768);
    desc.stream = one_in(2);
    n = virtual_stages(&desc.parallel);
    code = cf_cost_estimate(&desc, stages, n, &timing, &step, &error);
    begin("estimate");
    for (i = 0; code == CF_OK && i < n; i++) {
        row("stage", i);
        add_stage_cost(&stages[i]);
    }
    if (code == CF_OK) {
        real("step", step);
        real("latency", timing.latency);
        real("seconds_per_token", timing.seconds_per_token);
        real("offload", timing.offload_seconds_per_token);
        real("stream_forward", timing.stream_forward);
        real("stream_backward", timing.stream_backward);
        real("stream_exposed", timing.stream_exposed);
        number("no_overlap", timing.no_overlap);
    }
    finish(code, &error);
}

static void add_candidate(const cf_tuning *t, int64_t i) {
    const cf_tune_candidate *c = &t->candidates[i];
    int64_t j;
    row("candidate", i);
    number("split", c->split);
    number("chunk_size", c->chunk_size);
    number("k", c->k);
    number("kind", (int64_t)c->kind);
    number("replay", (int64_t)c->replay);
    number("offload", c->offload);
    number("state window", c->state_window);
    real("waiting", c->waiting);
    number("status", (int64_t)c->status);
    text("why", c->why);
    number("same_as", c->same_as);
    number("limited", c->limited);
    real("seconds", c->seconds);
    real("confidence", c->confidence);
    real("behind", c->behind);
    real("behind_confidence", c->behind_confidence);
    real("bubble", c->bubble);
    real("bound", c->bound);
    real("chunks", c->chunks);
    number("bytes", c->bytes);
    number("stage", c->stage);
    number("total", c->memory.total);
    number("host", c->memory.host);
    number("peak_batch", c->peak_batch);
    number("peak_rank", c->peak_rank);
    add_action(&c->peak_action);
    real("peak_seconds", c->peak_seconds);
    for (j = 0; j < t->n_batches; j++) real("batch", t->seconds[i * t->n_batches + j]);
}

static void add_tuning(const cf_tuning *t) {
    int64_t i;
    row("tuning", t->n_candidates);
    for (i = 0; i < t->n_splits; i++) {
        row("split", t->splits[i].tp);
        number("pp", t->splits[i].pp);
        number("dp", t->splits[i].dp);
    }
    for (i = 0; i < t->n_candidates; i++) add_candidate(t, i);
    row("winner", t->winner);
    for (i = 0; i < t->n_batches; i++) number("tokens", t->batch_tokens[i]);
    for (i = 0; i < t->n_ranked; i++) number("ranked", t->ranking[i]);
    for (i = 0; i < t->n_neighbours; i++) number("neighbour", t->neighbours[i]);
    number("limit_bytes", t->limit_bytes);
    number("smallest_limit", t->smallest_limit);
    number("interrupted", t->interrupted);
    number("n_simulated", t->n_simulated);
}

static cf_tune_desc draw_tune_desc(const cf_model *model) {
    static const int64_t sizes[] = {512, 2048, 8192}, ks[] = {1, 4};
    static const cf_schedule_kind kinds[] = {CF_SCHEDULE_PAPER, CF_SCHEDULE_1F1B, CF_SCHEDULE_BEST};
    cf_tune_desc desc;
    memset(&desc, 0, sizeof desc);
    desc.model = model;
    desc.gpu = draw_gpu();
    desc.chunk_sizes = sizes;
    desc.n_chunk_sizes = between(1, 3);
    desc.ks = ks;
    desc.n_ks = between(1, 2);
    desc.kinds = kinds;
    desc.n_kinds = between(1, 3);
    desc.parallel.pp = between(1, 3);
    desc.parallel.dp = between(1, 2);
    if (one_in(3)) {
        desc.parallel.pp = desc.parallel.dp = 0;
        desc.n_gpus = 2;
    }
    desc.no_offload = one_in(2);
    desc.no_stream = one_in(2);
    desc.budget = between(1, 4);
    desc.batch = between(4, 8);
    desc.n_batches = between(1, 3);
    desc.seed = draw();
    desc.n_exact = between(0, 3);
    if (one_in(2)) desc.limit_bytes = between(6, 40) << 30;
    return desc;
}

static void record_tune(void) {
    const cf_model *model = cf_model_find(one_in(2) ? "qwen2.5-0.5b" : "qwen2.5-1.5b");
    int64_t lengths[24], i;
    cf_tune_desc desc = draw_tune_desc(model);
    cf_tuning *tuning = NULL;
    cf_error error = no_error();
    cf_result code;
    for (i = 0; i < 24; i++) lengths[i] = between(10, one_in(6) ? 40000 : 3000);
    code = cf_tune(lengths, 24, &desc, &tuning, &error);
    begin("tune");
    if (code == CF_OK) add_tuning(tuning);
    finish(code, &error);
    cf_tuning_free(tuning);
}

static void record_tuning(const cf_plan *plan, const cf_schedule *schedule) {
    begin_part(8);
    record_fit();
    record_cost_estimate();
    begin("tune-budget");
    number("budget", cf_tune_budget(plan, schedule->n_stages, schedule->n_virtual));
    finish(CF_OK, NULL);
    if (record.case_id % 20 == 0) record_tune();
}

#endif /* RECORD_NO_TUNE */

/* ---- wrong inputs: descriptors ---- */

typedef enum member_type {
    INTEGER,  /* int64_t */
    NEGATIVE, /* int64_t of which a large one would take too long, or is known to go wrong */
    SMALL,    /* int or enum */
    REAL
} member_type;

typedef struct member {
    const char *name;
    size_t offset;
    member_type type;
} member;

#define MEMBER(of, name, type) {#name, offsetof(of, name), type}
#define COUNT(array) ((int64_t)(sizeof(array) / sizeof(array)[0]))

static const member pack_members[] = {
    MEMBER(cf_pack_desc, chunk_size, INTEGER), MEMBER(cf_pack_desc, method, SMALL),
    MEMBER(cf_pack_desc, split, SMALL),        MEMBER(cf_pack_desc, no_tails, SMALL),
    MEMBER(cf_pack_desc, align, INTEGER),      MEMBER(cf_pack_desc, max_slices, INTEGER),
    MEMBER(cf_pack_desc, n_ranks, INTEGER),    MEMBER(cf_pack_desc, cost.constant, REAL),
    MEMBER(cf_pack_desc, cost.per_token, REAL), MEMBER(cf_pack_desc, cost.per_pair, REAL)};

static const member schedule_members[] = {
    MEMBER(cf_schedule_desc, n_stages, INTEGER),
    MEMBER(cf_schedule_desc, kind, SMALL),
    MEMBER(cf_schedule_desc, replay, SMALL),
    MEMBER(cf_schedule_desc, n_virtual, INTEGER),
    MEMBER(cf_schedule_desc, k, NEGATIVE), /* cf__backward_heads adds to it without a check: 2^63 - 1 overflows */
    MEMBER(cf_schedule_desc, rank, INTEGER),
    MEMBER(cf_schedule_desc, limit, INTEGER),
    MEMBER(cf_schedule_desc, limit_bytes, INTEGER),
    MEMBER(cf_schedule_desc, bytes.per_token_activations, INTEGER),
    MEMBER(cf_schedule_desc, bytes.per_token_state, INTEGER),
    MEMBER(cf_schedule_desc, bytes.per_token_state_gradient, INTEGER),
    MEMBER(cf_schedule_desc, bytes.per_token_boundary, INTEGER),
    MEMBER(cf_schedule_desc, split_backward, SMALL),
    MEMBER(cf_schedule_desc, budget, NEGATIVE)};

static const member timing_members[] = {
    MEMBER(cf_timing, all.forward.constant, REAL),  MEMBER(cf_timing, all.forward.per_token, REAL),
    MEMBER(cf_timing, all.replay.per_pair, REAL),   MEMBER(cf_timing, all.backward.constant, REAL),
    MEMBER(cf_timing, all.input.per_token, REAL),   MEMBER(cf_timing, all.weight.per_pair, REAL),
    MEMBER(cf_timing, latency, REAL),               MEMBER(cf_timing, seconds_per_token, REAL),
    MEMBER(cf_timing, offload_seconds_per_token, REAL), MEMBER(cf_timing, no_overlap, SMALL),
    MEMBER(cf_timing, stream_forward, REAL),        MEMBER(cf_timing, stream_backward, REAL),
    MEMBER(cf_timing, stream_exposed, REAL)};

static const member graph_members[] = {
    MEMBER(cf_graph_desc, n_stages, INTEGER), MEMBER(cf_graph_desc, n_virtual, INTEGER),
    MEMBER(cf_graph_desc, k, INTEGER),        MEMBER(cf_graph_desc, replay, SMALL),
    MEMBER(cf_graph_desc, split, SMALL),      MEMBER(cf_graph_desc, rank, INTEGER)};

static const member simulate_members[] = {
    MEMBER(cf_simulate_desc, bytes.per_token_activations, INTEGER), MEMBER(cf_simulate_desc, limit, INTEGER),
    MEMBER(cf_simulate_desc, bytes.per_token_state, INTEGER), MEMBER(cf_simulate_desc, no_bounds, SMALL)};

static const member validate_members[] = {
    MEMBER(cf_validate_desc, bytes.per_token_activations, INTEGER), MEMBER(cf_validate_desc, limit, INTEGER),
    MEMBER(cf_validate_desc, bytes.per_token_boundary, INTEGER), MEMBER(cf_validate_desc, limit_bytes, INTEGER)};

static const member csv_members[] = {
    MEMBER(schedule_csv_desc, extensions, SMALL), MEMBER(schedule_csv_desc, format, SMALL),
    MEMBER(schedule_csv_desc, legacy, SMALL),     MEMBER(schedule_csv_desc, kind, SMALL),
    MEMBER(schedule_csv_desc, replay, SMALL),     MEMBER(schedule_csv_desc, k, INTEGER),
    MEMBER(schedule_csv_desc, rank, INTEGER),     MEMBER(schedule_csv_desc, buffered, SMALL)};

static const member model_members[] = {
    MEMBER(cf_model, layers, INTEGER),   MEMBER(cf_model, hidden, INTEGER), MEMBER(cf_model, heads, INTEGER),
    MEMBER(cf_model, kv_heads, INTEGER), MEMBER(cf_model, head_dim, INTEGER), MEMBER(cf_model, ffn, INTEGER),
    MEMBER(cf_model, vocab, INTEGER),    MEMBER(cf_model, tied, SMALL),     MEMBER(cf_model, no_gate, SMALL)};

static const member memory_members[] = {
    MEMBER(cf_memory_desc, parallel.tp, INTEGER),
    MEMBER(cf_memory_desc, parallel.pp, INTEGER),
    MEMBER(cf_memory_desc, parallel.n_virtual, INTEGER),
    MEMBER(cf_memory_desc, parallel.dp, INTEGER),
    MEMBER(cf_memory_desc, parallel.zero, INTEGER),
    MEMBER(cf_memory_desc, parallel.recompute, SMALL),
    MEMBER(cf_memory_desc, parallel.vocab_multiple, INTEGER),
    MEMBER(cf_memory_desc, loss, SMALL),
    MEMBER(cf_memory_desc, activation_bytes, INTEGER),
    MEMBER(cf_memory_desc, parameter_bytes, INTEGER),
    MEMBER(cf_memory_desc, gradient_bytes, INTEGER),
    MEMBER(cf_memory_desc, optimizer_bytes, INTEGER),
    MEMBER(cf_memory_desc, state_bytes, INTEGER),
    MEMBER(cf_memory_desc, state_gradient_bytes, INTEGER),
    MEMBER(cf_memory_desc, runtime_bytes, INTEGER),
    MEMBER(cf_memory_desc, fragmentation, INTEGER),
    MEMBER(cf_memory_desc, state_window, INTEGER)};

static const member load_members[] = {
    MEMBER(cf_memory_load, live_tokens, INTEGER),      MEMBER(cf_memory_load, chunk_tokens, INTEGER),
    MEMBER(cf_memory_load, state_tokens, INTEGER),     MEMBER(cf_memory_load, state_gradient_tokens, INTEGER),
    MEMBER(cf_memory_load, offloaded_tokens, INTEGER), MEMBER(cf_memory_load, input_tokens, INTEGER),
    MEMBER(cf_memory_load, live_scores, INTEGER),      MEMBER(cf_memory_load, chunk_scores, INTEGER)};

static int64_t wrong_integer(int negative_only) {
    static const int64_t values[] = {-1, INT64_MIN, -7, INT64_MAX, ((int64_t)1 << 48) + 1, 3000000000, 7};
    return values[between(0, negative_only ? 2 : 6)];
}

static double wrong_real(void) {
    static const uint64_t bits[] = {0xbff0000000000000u, 0x7ff8000000000000u, 0x7ff0000000000000u,
                                    0xfff0000000000000u, 0x7fe1ccf385ebc8a0u, 0x8000000000000001u};
    double value;
    memcpy(&value, &bits[between(0, 5)], sizeof value); /* -1, NaN, the infinities, 1e308, less than nothing */
    return value;
}

/* Puts a wrong value into one of the members, and makes it part of the name of what is recorded. */
static const char *spoil(void *of, const member *members, int64_t n, const char *function) {
    static char name[80];
    const member *m = &members[between(0, n - 1)];
    char *at = (char *)of + m->offset;
    if (m->type == REAL) {
        double value = wrong_real();
        memcpy(at, &value, sizeof value);
        snprintf(name, sizeof name, "%s(%s=%g)", function, m->name, value);
    } else if (m->type == SMALL) {
        int value = one_in(2) ? -1 : (int)between(5, 99);
        memcpy(at, &value, sizeof value);
        snprintf(name, sizeof name, "%s(%s=%d)", function, m->name, value);
    } else {
        int64_t value = wrong_integer(m->type == NEGATIVE);
        memcpy(at, &value, sizeof value);
        snprintf(name, sizeof name, "%s(%s=%lld)", function, m->name, (long long)value);
    }
    return name;
}

static void wrong_pack(const batch *b) {
    batch w = *b;
    cf_plan *plan = NULL;
    cf_error error = no_error();
    cf_result code;
    if (b->pack.chunk_size > 100000) return; /* a small chunk_size would make millions of chunks */
    if (w.n && one_in(3)) {
        int64_t at = between(0, w.n - 1);
        w.lengths[at] = wrong_integer(1);
        begin("pack(length=%lld)", (long long)w.lengths[at]);
    } else begin("%s", spoil(&w.pack, pack_members, COUNT(pack_members), "pack"));
    code = cf_pack(w.lengths, w.n, &w.pack, &plan, &error);
    if (plan) add_plan(plan);
    finish(code, &error);
    cf_plan_free(plan);
}

static void wrong_schedule(const batch *b, const cf_plan *plan) {
    batch w = *b;
    cf_schedule *schedule = NULL;
    cf_error error = no_error();
    cf_result code;
    w.schedule.kind = (cf_schedule_kind)between(CF_SCHEDULE_PAPER, CF_SCHEDULE_BEST);
    if (w.schedule.kind == CF_SCHEDULE_INTERLEAVED || one_in(10)) w.schedule.n_virtual = w.n_virtual;
    if (w.schedule.budget > 6) w.schedule.budget = 6;
    w.schedule.timing = &w.timing;
    w.timing.stages = NULL;
    switch (between(0, 3)) {
        case 0: begin("%s", spoil(&w.timing, timing_members, COUNT(timing_members), "schedule")); break;
        case 1:
            w.timing.stages = w.stages;
            begin("%s", spoil(&w.stages[between(0, 7)], timing_members, 6, "schedule-stages"));
            break;
        default: begin("%s", spoil(&w.schedule, schedule_members, COUNT(schedule_members), "schedule")); break;
    }
    code = cf_schedule_make(plan, &w.schedule, &schedule, &error);
    if (schedule) add_schedule(schedule);
    finish(code, &error);
    cf_schedule_free(schedule);
}

static void wrong_graph(const batch *b, const cf_plan *plan) {
    batch w = *b;
    cf_graph_desc desc = draw_graph_desc(b);
    cf_graph *graph = NULL;
    cf_error error = no_error();
    cf_result code;
    w.timing.stages = NULL;
    desc.timing = &w.timing;
    if (one_in(2)) begin("%s", spoil(&w.timing, timing_members, COUNT(timing_members), "graph"));
    else begin("%s", spoil(&desc, graph_members, COUNT(graph_members), "graph"));
    code = cf_graph_make(plan, &desc, &graph, &error);
    if (graph) number("n_nodes", graph->n_nodes);
    finish(code, &error);
    cf_graph_free(graph);
}

static void wrong_simulate(const batch *b, const cf_plan *plan, const cf_schedule *schedule) {
    batch w = *b;
    cf_simulate_desc desc;
    cf_timeline *timeline = NULL;
    cf_error error = no_error();
    cf_result code;
    memset(&desc, 0, sizeof desc);
    w.timing.stages = NULL;
    desc.timing = &w.timing;
    desc.bytes = b->schedule.bytes;
    if (one_in(2)) begin("%s", spoil(&w.timing, timing_members, COUNT(timing_members), "simulate"));
    else begin("%s", spoil(&desc, simulate_members, COUNT(simulate_members), "simulate"));
    code = cf_simulate(plan, schedule, &desc, &timeline, &error);
    if (timeline) add_timeline(timeline);
    finish(code, &error);
    cf_timeline_free(timeline);
}

static void wrong_validate(const batch *b, const cf_plan *plan, const cf_schedule *schedule) {
    cf_validate_desc desc;
    cf_error error = no_error();
    memset(&desc, 0, sizeof desc);
    desc.bytes = b->schedule.bytes;
    desc.limit_bytes = one_in(2) ? between(1, 400) * plan->chunk_size : 0;
    begin("%s", spoil(&desc, validate_members, COUNT(validate_members), "validate"));
    finish(cf_schedule_validate(plan, schedule, &desc, NULL, &error), &error);
}

static void wrong_memory(void) {
    cf_model model = draw_model();
    cf_memory_desc desc = draw_memory_desc(&model);
    cf_memory_load loads[MOST_STAGES];
    cf_memory_report reports[MOST_STAGES];
    cf_parameters parameters;
    cf_error error = no_error();
    cf_result code;
    int64_t n = virtual_stages(&desc.parallel), pp = desc.parallel.pp ? desc.parallel.pp : 1;
    draw_loads(loads, n);
    switch (between(0, 2)) {
        case 0: begin("%s", spoil(&model, model_members, COUNT(model_members), "memory")); break;
        case 1: begin("%s", spoil(&desc, memory_members, COUNT(memory_members), "memory")); break;
        default: begin("%s", spoil(&loads[n - 1], load_members, COUNT(load_members), "memory")); break;
    }
    number("model", (int64_t)cf_model_validate(&model, NULL));
    number("parallel", (int64_t)cf_parallel_validate(&model, &desc.parallel, NULL));
    number("parameters", (int64_t)cf_stage_parameters(&model, &desc.parallel, pp * 2, &parameters, NULL));
    code = cf_memory_estimate(&desc, loads, n, reports, pp, &error);
    if (code == CF_OK) number("total", reports[0].total);
    finish(code, &error);
}

/* ---- wrong inputs: objects with one member changed ---- */

static int64_t changed(int64_t value) {
    switch (between(0, 4)) {
        case 0: return value - 1;
        case 1: return value + 1;
        case 2: return between(0, 20);
        case 3: return -value - 1;
        default: return wrong_integer(0);
    }
}

/* Counts only shrink: what is checked is read within them. */
static int64_t shrunk(int64_t value) {
    if (value > 0 && one_in(2)) return value - 1;
    return one_in(2) ? -1 : value / 2;
}

static void wrong_plan_head(cf_plan *plan) {
    static const member counts[] = {MEMBER(cf_plan, n_chunks, INTEGER), MEMBER(cf_plan, n_groups, INTEGER),
                                    MEMBER(cf_plan, n_slices, INTEGER)};
    static const member others[] = {
        MEMBER(cf_plan, chunk_size, INTEGER), MEMBER(cf_plan, align, INTEGER),   MEMBER(cf_plan, max_slices, INTEGER),
        MEMBER(cf_plan, n_empty, INTEGER),    MEMBER(cf_plan, n_tokens, INTEGER), MEMBER(cf_plan, n_ranks, INTEGER),
        MEMBER(cf_plan, n_steps, INTEGER),    MEMBER(cf_plan, n_idle, INTEGER),  MEMBER(cf_plan, lower_bound, INTEGER),
        MEMBER(cf_plan, n_sequences, INTEGER)};
    int count = one_in(4);
    const member *m = count ? &counts[between(0, COUNT(counts) - 1)] : &others[between(0, COUNT(others) - 1)];
    int64_t value;
    memcpy(&value, (char *)plan + m->offset, sizeof value);
    value = count ? shrunk(value) : changed(value);
    memcpy((char *)plan + m->offset, &value, sizeof value);
    begin("plan-validate(%s=%lld)", m->name, (long long)value);
}

/* Chunks, slices and groups hold nothing but int64_t. */
static void wrong_plan_item(cf_plan *plan) {
    static const char *const chunk[] = {"first_slice", "n_slices", "tokens", "padded", "pairs",
                                        "group",       "index",    "prefix", "rank"};
    static const char *const slice[] = {"sequence", "begin", "length", "offset"};
    static const char *const group[] = {"sequence", "first_chunk", "n_chunks", "tokens"};
    int64_t item, at, which = between(0, 2), *values;
    const char *name;
    if (which == 1 && plan->n_slices) {
        item = between(0, plan->n_slices - 1);
        values = &plan->slices[item].sequence;
        name = slice[at = between(0, 3)];
    } else if (which == 2 && plan->n_groups) {
        item = between(0, plan->n_groups - 1);
        values = &plan->groups[item].sequence;
        name = group[at = between(0, 3)];
    } else {
        item = between(0, plan->n_chunks - 1);
        values = &plan->chunks[item].first_slice;
        name = chunk[at = between(0, 8)];
    }
    values[at] = changed(values[at]);
    begin("plan-validate(%lld.%s=%lld)", (long long)item, name, (long long)values[at]);
}

static void wrong_plan(const batch *b) {
    cf_plan *plan = NULL;
    cf_plan good;
    cf_error error = no_error();
    if (cf_pack(b->lengths, b->n, &b->pack, &plan, NULL) != CF_OK) return;
    good = *plan;
    if (plan->n_chunks == 0 || one_in(3)) wrong_plan_head(plan);
    else wrong_plan_item(plan);
    finish(cf_plan_validate(plan, b->lengths, b->n, NULL, &error), &error);
    *plan = good;
    cf_plan_free(plan);
}

static void wrong_action(cf_schedule *s) {
    int64_t at = between(0, s->n_actions - 1), other = between(0, s->n_actions - 1);
    cf_action *a = &s->actions[at], saved = *a;
    switch (between(0, 6)) {
        case 0: a->chunk = (int32_t)between(-1, s->n_chunks); break;
        case 1: a->stage = (int32_t)between(-1, s->n_stages * s->n_virtual); break;
        case 2: a->pass = (uint8_t)between(0, CF_PASS_COUNT + 1); break;
        case 3: a->keep = (uint8_t)between(0, 2); break;
        case 4: a->reserved = 1; break;
        case 5: *a = s->actions[other]; break;
        default:
            *a = s->actions[other];
            s->actions[other] = saved;
            break;
    }
}

static void wrong_schedule_head(cf_schedule *s) {
    int64_t at;
    switch (between(0, 8)) {
        case 0: s->n_stages = shrunk(s->n_stages); break;
        case 1: s->n_virtual = changed(s->n_virtual); break;
        case 2: s->k = between(-2, 40); break; /* the same */
        case 3: s->rank = changed(s->rank); break;
        case 4: s->n_chunks = changed(s->n_chunks); break;
        case 5: s->n_actions = shrunk(s->n_actions); break;
        case 6: s->lowered = !s->lowered; break;
        case 7:
            at = between(0, s->n_stages);
            s->first[at] += between(-1, 1);
            break;
        default: s->replay = s->replay == CF_REPLAY_LOCAL ? CF_REPLAY_PIPELINE : CF_REPLAY_LOCAL; break;
    }
}

/* What each reader of a schedule says to the changed one. */
static void judge_schedule(const batch *b, const cf_plan *plan, cf_schedule *s, const char *name) {
    cf_simulate_desc desc;
    cf_timeline *timeline = NULL;
    cf_schedule *lowered = NULL;
    cf_error error = no_error();
    cf_result code;
    begin("%s.validate", name);
    finish(cf_schedule_validate(plan, s, NULL, NULL, &error), &error);
    memset(&desc, 0, sizeof desc);
    desc.timing = b->schedule.timing;
    error = no_error();
    code = cf_simulate(plan, s, &desc, &timeline, &error);
    begin("%s.simulate", name);
    if (timeline) {
        real("makespan", timeline->makespan);
        add_times(timeline, s->first[s->n_stages]); /* others have no times where n_stages was made smaller */
    }
    finish(code, &error);
    cf_timeline_free(timeline);
    error = no_error();
    code = cf_schedule_lower(plan, s, NULL, &lowered, &error);
    begin("%s.lower", name);
    if (lowered) add_schedule(lowered);
    finish(code, &error);
    cf_schedule_free(lowered);
    record_run(plan, s, name);
}

static void wrong_schedule_object(const batch *b, const cf_plan *plan, cf_schedule *schedule) {
    cf_schedule good = *schedule;
    int64_t n_first = good.n_stages + 1;
    size_t bytes = (size_t)good.n_actions * sizeof *good.actions;
    cf_action *actions = (cf_action *)malloc(bytes + 1);
    int64_t *first = (int64_t *)malloc((size_t)n_first * sizeof *first);
    memcpy(actions, good.actions, bytes);
    memcpy(first, good.first, (size_t)n_first * sizeof *first);
    if (good.n_actions == 0 || one_in(3)) wrong_schedule_head(schedule);
    else wrong_action(schedule);
    judge_schedule(b, plan, schedule, good.lowered ? "changed-lowered" : "changed");
    *schedule = good;
    memcpy(good.actions, actions, bytes);
    memcpy(good.first, first, (size_t)n_first * sizeof *first);
    free(first);
    free(actions);
}

static void wrong_graph_item(cf_graph *g) {
    int64_t node = between(0, g->n_nodes - 1), wrong = changed(0);
    switch (between(0, 8)) {
        case 0: g->nodes[node].chunk = (int32_t)between(-1, 40); break;
        case 1: g->nodes[node].stage = (int32_t)between(-1, 20); break;
        case 2: g->nodes[node].pass = (int32_t)between(-1, 6); break;
        case 3: g->nodes[node].keep = (int32_t)between(-1, 2); break;
        case 4: g->nodes[node].seconds = wrong_real(); break;
        case 5: g->first_in[between(0, g->n_nodes)] = wrong; break;
        case 6: g->first_out[between(0, g->n_nodes)] = wrong; break;
        case 7: g->first[between(0, g->n_steps)] = wrong; break;
        default: g->n_nodes = shrunk(g->n_nodes); break;
    }
}

static void wrong_edge(cf_graph *g) {
    cf_edge *edge = &g->edges[between(0, g->n_edges - 1)];
    int32_t out = (int32_t)between(-1, g->n_edges);
    switch (between(0, 4)) {
        case 0: edge->from = (int32_t)between(-1, g->n_nodes); break;
        case 1: edge->to = (int32_t)between(-1, g->n_nodes); break;
        case 2: edge->why = (int32_t)between(-1, CF_EDGE_COUNT); break;
        case 3: edge->seconds = wrong_real(); break;
        default: g->out[between(0, g->n_edges - 1)] = out; break;
    }
}

static void wrong_graph_object(const batch *b, const cf_plan *plan) {
    cf_graph_desc desc = draw_graph_desc(b);
    cf_graph *graph = NULL;
    cf_graph good;
    cf_error error = no_error();
    if (cf_graph_make(plan, &desc, &graph, NULL) != CF_OK) return;
    good = *graph;
    if (graph->n_edges && one_in(2)) wrong_edge(graph);
    else if (graph->n_nodes) wrong_graph_item(graph);
    begin("changed-graph.validate");
    finish(cf_graph_validate(graph, NULL, &error), &error);
    *graph = good;
    cf_graph_free(graph);
}

/* ---- wrong inputs: text ---- */

static void spoil_text(collector *c) {
    static const char bytes[] = ",,\n\r 0129FBIWRSx-\t";
    size_t at = (size_t)between(0, (int64_t)c->used);
    char byte = bytes[between(0, (int64_t)sizeof bytes - 2)];
    switch (between(0, 3)) {
        case 0: c->used = at; break;
        case 1:
            if (at < c->used) c->data[at] = byte;
            break;
        case 2:
            if (at < c->used) memmove(c->data + at, c->data + at + 1, c->used - at - 1);
            if (at < c->used) c->used--;
            break;
        default:
            memmove(c->data + at + 1, c->data + at, c->used - at); /* the place of the ending zero */
            c->data[at] = byte;
            c->used++;
            break;
    }
}

static void wrong_text(const cf_plan *plan, const cf_schedule *schedule) {
    schedule_csv_desc desc;
    collector c = new_collector();
    memset(&desc, 0, sizeof desc);
    desc.extensions = 1;
    if (schedule_csv_write(plan, schedule, &desc, collect, &c, NULL) == CF_OK && c.data) {
        desc.replay = schedule->replay;
        desc.rank = schedule->rank;
        spoil_text(&c);
        record_read(plan, &desc, c.data, c.used, "wrong");
        record_read(plan, &desc, c.data, c.used, spoil(&desc, csv_members, COUNT(csv_members), "wrong"));
    }
    free(c.data);
}

static void wrong_write(const cf_plan *plan, const cf_schedule *schedule) {
    collector c = new_collector();
    cf_error error = no_error();
    c.pieces = between(0, 3);
    begin("json.refused");
    finish(cf_write_plan_json(plan, NULL, collect, &c, &error), &error);
    c.pieces = between(0, 3);
    error = no_error();
    begin("csv.refused");
    finish(schedule_csv_write(plan, schedule, NULL, collect, &c, &error), &error);
    free(c.data);
}

/* ---- wrong inputs: nothing given, no place ---- */

#define REFUSED(name, call)       \
    do {                          \
        error = no_error();       \
        begin("null.%s", name);   \
        finish(call, &error);     \
    } while (0)

static void record_null_makers(const batch *b, const cf_plan *plan, const cf_schedule *schedule) {
    cf_error error;
    cf_plan *made = NULL;
    cf_schedule *ordered = NULL;
    cf_timeline *timeline = NULL;
    cf_graph *graph = NULL;
    cf_runner *runner = NULL;
    REFUSED("pack.lengths", cf_pack(NULL, 3, &b->pack, &made, &error));
    REFUSED("pack.n", cf_pack(b->lengths, -1, &b->pack, &made, &error));
    REFUSED("pack.desc", cf_pack(b->lengths, b->n, NULL, &made, &error));
    REFUSED("pack.out", cf_pack(b->lengths, b->n, &b->pack, NULL, &error));
    REFUSED("schedule.plan", cf_schedule_make(NULL, &b->schedule, &ordered, &error));
    REFUSED("schedule.out", cf_schedule_make(plan, &b->schedule, NULL, &error));
    REFUSED("simulate.plan", cf_simulate(NULL, schedule, NULL, &timeline, &error));
    REFUSED("simulate.schedule", cf_simulate(plan, NULL, NULL, &timeline, &error));
    REFUSED("simulate.out", cf_simulate(plan, schedule, NULL, NULL, &error));
    REFUSED("measured.start", cf_timeline_measured(plan, schedule, NULL, NULL, NULL, NULL, &timeline, &error));
    REFUSED("lower.plan", cf_schedule_lower(NULL, schedule, NULL, &ordered, &error));
    REFUSED("lower.schedule", cf_schedule_lower(plan, NULL, NULL, &ordered, &error));
    REFUSED("lower.out", cf_schedule_lower(plan, schedule, NULL, NULL, &error));
    REFUSED("graph.plan", cf_graph_make(NULL, NULL, &graph, &error));
    REFUSED("graph.out", cf_graph_make(plan, NULL, NULL, &error));
    REFUSED("open.plan", cf_run_open(NULL, schedule, 0, NULL, &runner, &error));
    REFUSED("open.schedule", cf_run_open(plan, NULL, 0, NULL, &runner, &error));
    REFUSED("open.stage", cf_run_open(plan, schedule, schedule->n_stages, NULL, &runner, &error));
    REFUSED("open.stage", cf_run_open(plan, schedule, -1, NULL, &runner, &error));
    REFUSED("open.out", cf_run_open(plan, schedule, 0, NULL, NULL, &error));
    REFUSED("run.desc", cf_run(plan, schedule, 0, NULL, NULL, &error));
    REFUSED("next", cf_run_next(NULL, &error));
    REFUSED("close", cf_run_close(NULL, NULL, &error));
    REFUSED("csv.text", schedule_csv_read(NULL, 4, plan, NULL, &ordered, NULL, &error));
    REFUSED("csv.empty", schedule_csv_read("", 0, plan, NULL, &ordered, NULL, &error));
    REFUSED("csv.plan", schedule_csv_read("0F0", 3, NULL, NULL, &ordered, NULL, &error));
    REFUSED("csv.out", schedule_csv_read("0F0", 3, plan, NULL, NULL, NULL, &error));
    cf_plan_free(made); /* of a batch without chunks something may have been made */
    cf_schedule_free(ordered);
    cf_timeline_free(timeline);
    cf_graph_free(graph);
    cf_run_close(runner, NULL, NULL);
}

static void record_null_readers(const batch *b, const cf_plan *plan, const cf_schedule *schedule) {
    cf_error error;
    size_t bytes = 0;
    double weight = 0;
    cf_arena space = {0}; /* only for its alignment */
    cf_metadata metadata;
    cf_plan_stats stats;
    collector c = new_collector();
    REFUSED("plan-validate.plan", cf_plan_validate(NULL, b->lengths, b->n, NULL, &error));
    REFUSED("plan-validate.lengths", cf_plan_validate(plan, NULL, b->n, NULL, &error));
    REFUSED("plan-validate.n", cf_plan_validate(plan, b->lengths, b->n - 1, NULL, &error));
    REFUSED("validate.plan", cf_schedule_validate(NULL, schedule, NULL, NULL, &error));
    REFUSED("validate.schedule", cf_schedule_validate(plan, NULL, NULL, NULL, &error));
    REFUSED("graph-validate", cf_graph_validate(NULL, NULL, &error));
    REFUSED("metadata-size.plan", cf_metadata_size(NULL, 0, NULL, &bytes, &error));
    REFUSED("metadata-size.chunk", cf_metadata_size(plan, plan->n_chunks, NULL, &bytes, &error));
    REFUSED("metadata-size.out", cf_metadata_size(plan, 0, NULL, NULL, &error));
    REFUSED("metadata.space", cf_metadata_fill(plan, 0, NULL, &space, 1, &metadata, &error));
    REFUSED("metadata.chunk", cf_metadata_fill(plan, -2, NULL, &space, 1, &metadata, &error));
    REFUSED("metadata.memory", cf_metadata_fill(plan, 0, NULL, NULL, 1, &metadata, &error));
    REFUSED("loss-weights.lengths", cf_loss_weights(NULL, 1, NULL, &weight, &error));
    REFUSED("loss-weights.n", cf_loss_weights(b->lengths, -1, NULL, &weight, &error));
    REFUSED("json.plan", cf_write_plan_json(NULL, NULL, collect, &c, &error));
    REFUSED("json.write", cf_write_plan_json(plan, NULL, NULL, &c, &error));
    REFUSED("json.schedule", cf_write_schedule_json(NULL, NULL, collect, &c, &error));
    REFUSED("dot.graph", graph_dot_write(NULL, 0, NULL, collect, &c, &error));
    REFUSED("csv.schedule", schedule_csv_write(plan, NULL, NULL, collect, &c, &error));
    cf_plan_measure(NULL, NULL, &stats);
    begin("null.measure");
    real("fill", stats.fill);
    number("state", cf_chunk_state_tokens(NULL, 0));
    real("cost", cf_cost_seconds(NULL, 5, 5));
    number("peek", cf_run_peek(NULL) == NULL);
    finish(CF_OK, NULL);
    free(c.data);
}

static void record_spaces(const batch *b, const cf_plan *plan, const cf_schedule *schedule) {
    char *memory = (char *)malloc(256);
    cf_run_desc desc;
    cf_plan *made = NULL;
    cf_schedule *ordered = NULL;
    cf_error error = no_error();
    size_t bytes = 0;
    memset(&desc, 0, sizeof desc);
    desc.memory = memory;
    desc.bytes = 16;
    REFUSED("pack-into.space", cf_pack_into(b->lengths, b->n, &b->pack, memory, 16, &made, &error));
    REFUSED("pack-into.align", cf_pack_into(b->lengths, b->n, &b->pack, memory + 4, 200, &made, &error));
    REFUSED("pack-into.null", cf_pack_into(b->lengths, b->n, &b->pack, NULL, 200, &made, &error));
    REFUSED("pack-size.null", cf_pack_size(b->lengths, b->n, &b->pack, NULL, &error));
    REFUSED("schedule-into.space", cf_schedule_into(plan, &b->schedule, memory, 16, &ordered, &error));
    REFUSED("schedule-into.align", cf_schedule_into(plan, &b->schedule, memory + 4, 200, &ordered, &error));
    REFUSED("schedule-into.null", cf_schedule_into(plan, &b->schedule, NULL, 200, &ordered, &error));
    REFUSED("schedule-size.plan", cf_schedule_size(NULL, &b->schedule, &bytes, &error));
    REFUSED("run.space", cf_run(plan, schedule, 0, &desc, NULL, &error));
    REFUSED("run-size.plan", cf_run_size(NULL, schedule, &bytes, &error));
    free(memory);
}

static void record_schedule_into(const batch *b, const cf_plan *plan) {
    cf_schedule_desc desc = b->schedule;
    size_t bytes = 0;
    void *memory;
    cf_schedule *schedule = NULL;
    cf_error error = no_error();
    cf_result code;
    desc.kind = (cf_schedule_kind)between(CF_SCHEDULE_PAPER, CF_SCHEDULE_BEST);
    code = cf_schedule_size(plan, &desc, &bytes, &error);
    memory = malloc(bytes ? bytes : 1);
    if (code == CF_OK) code = cf_schedule_into(plan, &desc, memory, bytes, &schedule, &error);
    begin("schedule-into");
    if (code == CF_OK) add_schedule(schedule);
    finish(code, &error);
    free(memory);
}

/* ---- allocators that fail ---- */

typedef struct miser {
    int64_t left; /* allocations until it refuses; -1: it never does */
    int64_t held;
} miser;

static void *miser_alloc(size_t bytes, void *user) {
    miser *m = (miser *)user;
    if (m->left == 0) return NULL;
    m->left--;
    m->held++;
    return malloc(bytes);
}

static void miser_release(void *memory, void *user) {
    miser *m = (miser *)user;
    if (memory) m->held--;
    free(memory);
}

typedef cf_result (*allocating)(const batch *, const cf_plan *, const cf_schedule *, const cf_allocator *);

static cf_result allocate_plan(const batch *b, const cf_plan *plan, const cf_schedule *s, const cf_allocator *a) {
    cf_pack_desc desc = b->pack;
    cf_plan *made = NULL;
    cf_result code;
    (void)plan;
    (void)s;
    desc.allocator = a;
    code = cf_pack(b->lengths, b->n, &desc, &made, NULL);
    cf_plan_free(made);
    return code;
}

static cf_result allocate_schedule(const batch *b, const cf_plan *plan, const cf_schedule *s, const cf_allocator *a) {
    cf_schedule_desc desc = b->schedule;
    cf_schedule *made = NULL;
    cf_result code;
    desc.limit = CF_NO_LIMIT;
    desc.limit_bytes = 0;
    desc.limits = desc.limits_bytes = NULL;
    desc.kind = s->kind;
    if (desc.kind == CF_SCHEDULE_INTERLEAVED || desc.kind == CF_SCHEDULE_BEST) desc.n_virtual = b->n_virtual;
    desc.allocator = a;
    code = cf_schedule_make(plan, &desc, &made, NULL);
    cf_schedule_free(made);
    return code;
}

static cf_result allocate_graph(const batch *b, const cf_plan *plan, const cf_schedule *s, const cf_allocator *a) {
    cf_graph_desc desc;
    cf_graph *graph = NULL;
    cf_result code;
    memset(&desc, 0, sizeof desc);
    desc.n_stages = s->n_stages;
    desc.timing = b->schedule.timing;
    desc.allocator = a;
    code = cf_graph_make(plan, &desc, &graph, NULL);
    if (code == CF_OK) code = cf_graph_validate(graph, a, NULL);
    cf_graph_free(graph);
    return code;
}

static cf_result allocate_timeline(const batch *b, const cf_plan *plan, const cf_schedule *s, const cf_allocator *a) {
    cf_simulate_desc desc;
    cf_timeline *timeline = NULL;
    cf_result code;
    memset(&desc, 0, sizeof desc);
    desc.timing = b->schedule.timing;
    desc.allocator = a;
    code = cf_simulate(plan, s, &desc, &timeline, NULL);
    cf_timeline_free(timeline);
    return code;
}

static cf_result allocate_lowered(const batch *b, const cf_plan *plan, const cf_schedule *s, const cf_allocator *a) {
    cf_lower_desc desc;
    cf_schedule *lowered = NULL;
    cf_result code;
    memset(&desc, 0, sizeof desc);
    desc.timing = b->schedule.timing;
    desc.offload = 1;
    desc.allocator = a;
    code = cf_schedule_lower(plan, s, &desc, &lowered, NULL);
    cf_schedule_free(lowered);
    return code;
}

static cf_result allocate_checks(const batch *b, const cf_plan *plan, const cf_schedule *s, const cf_allocator *a) {
    cf_result code = cf_plan_validate(plan, b->lengths, b->n, a, NULL);
    return code == CF_OK ? cf_schedule_validate(plan, s, NULL, a, NULL) : code;
}

static cf_result allocate_run(const batch *b, const cf_plan *plan, const cf_schedule *s, const cf_allocator *a) {
    cf_run_desc desc;
    (void)b;
    memset(&desc, 0, sizeof desc);
    desc.allocator = a;
    return cf_run(plan, s, 0, &desc, NULL, NULL);
}

static cf_result allocate_read(const batch *b, const cf_plan *plan, const cf_schedule *s, const cf_allocator *a) {
    schedule_csv_desc desc;
    collector c = new_collector();
    cf_schedule *made = NULL;
    cf_result code;
    (void)b;
    memset(&desc, 0, sizeof desc);
    desc.extensions = 1;
    desc.replay = s->replay;
    desc.rank = s->rank;
    desc.allocator = a;
    code = schedule_csv_write(plan, s, &desc, collect, &c, NULL);
    if (code == CF_OK) code = schedule_csv_read(c.data ? c.data : "", c.used, plan, &desc, &made, NULL, NULL);
    cf_schedule_free(made);
    free(c.data);
    return code;
}

/* Lets one allocation after the other fail. What may come out is "no memory", and in the end what comes out with enough
   of it; how many allocations there are is nobody's business. */
static void record_failing(const batch *b, const cf_plan *plan, const cf_schedule *s, allocating make,
                           const char *name) {
    miser m = {-1, 0};
    cf_allocator allocator;
    cf_result full, code = CF_ERROR_MEMORY;
    int64_t at, leaked = 0, others = 0;
    allocator.alloc = miser_alloc;
    allocator.release = miser_release;
    allocator.user = &m;
    full = make(b, plan, s, &allocator);
    for (at = 0; code == CF_ERROR_MEMORY && at < 400; at++) {
        m.left = at;
        code = make(b, plan, s, &allocator);
        if (code != CF_ERROR_MEMORY && code != full) others++;
        leaked += m.held;
    }
    begin("no-memory.%s", name);
    number("with memory", (int64_t)full);
    number("in the end", (int64_t)code);
    number("leaked", leaked);
    number("other results", others);
    if (leaked || others) snprintf(record.note, sizeof record.note, " LEAKED %d OTHERS %d", (int)leaked, (int)others);
    finish(CF_OK, NULL);
}

static void record_no_memory(const batch *b, const cf_plan *plan, const cf_schedule *s) {
    record_failing(b, plan, s, allocate_plan, "plan");
    record_failing(b, plan, s, allocate_schedule, "schedule");
    record_failing(b, plan, s, allocate_graph, "graph");
    record_failing(b, plan, s, allocate_timeline, "timeline");
    record_failing(b, plan, s, allocate_lowered, "lowered");
    record_failing(b, plan, s, allocate_checks, "checks");
    record_failing(b, plan, s, allocate_run, "run");
    record_failing(b, plan, s, allocate_read, "read");
}

static void record_wrong_inputs(const batch *b, const cf_plan *plan, cf_schedule *schedule) {
    cf_schedule *lowered = NULL;
    int i;
    begin_part(9);
    for (i = 0; i < 2; i++) wrong_pack(b);
    for (i = 0; i < 3; i++) wrong_schedule(b, plan);
    wrong_graph(b, plan);
    wrong_simulate(b, plan, schedule);
    wrong_validate(b, plan, schedule);
    wrong_memory();
    begin_part(10);
    for (i = 0; i < 3; i++) wrong_plan(b);
    for (i = 0; i < 2; i++) wrong_schedule_object(b, plan, schedule);
    if (cf_schedule_lower(plan, schedule, NULL, &lowered, NULL) == CF_OK) wrong_schedule_object(b, plan, lowered);
    cf_schedule_free(lowered);
    wrong_graph_object(b, plan);
    begin_part(11);
    for (i = 0; i < 2; i++) wrong_text(plan, schedule);
    wrong_write(plan, schedule);
    record_schedule_into(b, plan);
}

/* Everything that must be refused, in some of the cases each. */
static void record_refusals(const batch *b, const cf_plan *plan, cf_schedule *schedule) {
    if (record.case_id % 4 == 0) record_wrong_inputs(b, plan, schedule);
    if (record.case_id % 50 == 0) {
        record_null_makers(b, plan, schedule);
        record_null_readers(b, plan, schedule);
        record_spaces(b, plan, schedule);
    }
    if (record.case_id % 20 == 1) record_no_memory(b, plan, schedule);
}

/* ---- what depends on no batch ---- */

static void record_names(void) {
    int i;
    begin("names");
    for (i = -2; i < 20; i++) {
        row("value", i);
        text("result", cf_result_name((cf_result)i));
        text("method", cf_pack_method_name((cf_pack_method)i));
        text("split", cf_split_method_name((cf_split_method)i));
        text("recompute", cf_recompute_name((cf_recompute)i));
        text("loss", cf_loss_name((cf_loss)i));
        text("pass", cf_pass_name((cf_pass)i));
        text("replay", cf_replay_name((cf_replay)i));
        text("edge", cf_edge_name((cf_edge_why)i));
        text("kind", cf_schedule_kind_name((cf_schedule_kind)i));
#ifndef RECORD_NO_TUNE
        text("status", cf_tune_status_name((cf_tune_status)i));
#endif
    }
    finish(CF_OK, NULL);
    begin("text:results");
    for (i = -2; i < 20; i++) text("text", cf_result_text((cf_result)i));
    finish(CF_OK, NULL);
}

static void record_models(void) {
    const cf_model *m;
    int64_t i;
    begin("models");
    for (i = 0; (m = cf_model_at(i)) != NULL; i++) {
        cf_parameters p;
        row("model", i);
        text("name", m->name);
        number("found", cf_model_find(m->name) == m);
        number("valid", (int64_t)cf_model_validate(m, NULL));
        if (cf_model_parameters(m, &p, NULL) == CF_OK) add_parameters(&p);
    }
    number("none", cf_model_find("no such model") == NULL);
    number("none", cf_model_find(NULL) == NULL);
    number("none", cf_model_at(-1) == NULL);
    number("case", cf_model_find("QWEN2.5-7B") == cf_model_find("qwen2.5-7b"));
    finish(CF_OK, NULL);
#ifndef RECORD_NO_TUNE
    begin("gpus");
    for (i = 0; cf_gpu_at(i); i++) {
        text("name", cf_gpu_at(i)->name);
        real("flops", cf_gpu_at(i)->flops);
        real("bandwidth", cf_gpu_at(i)->bandwidth);
        number("memory", cf_gpu_at(i)->memory);
        number("found", cf_gpu_find(cf_gpu_at(i)->name) == cf_gpu_at(i));
    }
    finish(CF_OK, NULL);
#endif
}

static void record_defaults(void) {
    cf_pack_desc pack = cf_pack_defaults(NULL);
    cf_schedule_desc schedule = cf_schedule_defaults(NULL);
    cf_parallel parallel;
    cf_memory_desc memory;
    memset(&parallel, 0, sizeof parallel);
    memset(&memory, 0, sizeof memory);
    parallel = cf_parallel_defaults(&parallel);
    memory = cf_memory_defaults(&memory);
    begin("defaults");
    number("method", (int64_t)pack.method);
    number("split", (int64_t)pack.split);
    number("align", pack.align);
    number("n_ranks", pack.n_ranks);
    number("kind", (int64_t)schedule.kind);
    number("replay", (int64_t)schedule.replay);
    number("n_stages", schedule.n_stages);
    number("n_virtual", schedule.n_virtual);
    number("k", schedule.k);
    number("parallel", parallel.tp * parallel.pp * parallel.dp * parallel.n_virtual);
    number("recompute", (int64_t)parallel.recompute);
    number("vocab_multiple", parallel.vocab_multiple);
    number("loss", (int64_t)memory.loss);
    number("activation_bytes", memory.activation_bytes);
    number("parameter_bytes", memory.parameter_bytes);
    number("gradient_bytes", memory.gradient_bytes);
    number("optimizer_bytes", memory.optimizer_bytes);
    number("state_bytes", memory.state_bytes);
    number("state_gradient_bytes", memory.state_gradient_bytes);
    number("runtime_bytes", memory.runtime_bytes);
    number("fragmentation", memory.fragmentation);
    number("state_window", memory.state_window);
    schedule.kind = CF_SCHEDULE_INTERLEAVED;
    schedule.n_virtual = 0;
    number("interleaved", cf_schedule_defaults(&schedule).n_virtual);
    finish(CF_OK, NULL);
}

static void record_numbers(void) {
    static const int64_t values[] = {-1, 0, 1, 5, 1000, 3000000000, (int64_t)1 << 48, INT64_MAX};
    int64_t i, j;
    begin("numbers");
    for (i = 0; i < COUNT(values); i++)
        for (j = 0; j < COUNT(values); j++) {
            row("pair", i * 8 + j);
            number("pairs", cf_slice_pairs(values[i], values[j]));
            number("seed", (int64_t)cf_chunk_seed((uint64_t)values[i], values[j], 3));
        }
    finish(CF_OK, NULL);
}

static void record_case(void) {
    batch b;
    cf_plan *plan;
    cf_schedule *schedule;
    cf_graph *graph;
    draw_batch(&b);
    record_memory();
    plan = record_plan(&b);
    if (!plan) return;
    record_chunks(&b, plan);
    graph = record_graph(&b, plan);
    if (graph) record_dot(graph);
    cf_graph_free(graph);
    schedule = record_schedules(&b, plan);
    if (schedule) {
        record_uses(&b, plan, schedule);
#ifndef RECORD_NO_TUNE
        record_tuning(plan, schedule);
#endif
        record_refusals(&b, plan, schedule);
    }
    cf_schedule_free(schedule);
    cf_plan_free(plan);
}

static void record_cases(int first, int count) {
    record.case_id = -1;
    record_names();
    record_models();
    record_defaults();
    record_numbers();
    for (record.case_id = first; record.case_id < first + count; record.case_id++) record_case();
}

#endif /* RECORD_HASH_ONLY */

int main(int argc, char **argv) {
    if (argc == 3 && strcmp(argv[1], "--hash") == 0) {
        hash_cases(atoi(argv[2]));
        return 0;
    }
#ifndef RECORD_HASH_ONLY
    if (argc == 3 && strcmp(argv[1], "--full") == 0) {
        record.full = 1;
        record_cases(atoi(argv[2]), 1);
        return 0;
    }
    if (argc == 1 || argc == 3) {
        record_cases(argc == 3 ? atoi(argv[1]) : 0, argc == 3 ? atoi(argv[2]) : 2000);
        return 0;
    }
#endif
    fprintf(stderr, "usage: record [FIRST COUNT | --full CASE | --hash COUNT]\n");
    return 2;
}
