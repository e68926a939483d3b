/* record.c - writes down the plans, schedules and timelines that the library makes of seeded inputs, so that two builds
   or two versions of it can be compared.

       make build/record
       record [FIRST COUNT]    cases FIRST .. FIRST + COUNT - 1 (0 2000), one line for each thing made
       record --full CASE      everything of one case in full
       record --hash COUNT     one number over so many cases

   A line is "CASE NAME ok HASH" or "CASE NAME CODE field=... item=...", so diff shows which case and what of it
   differs. The wording of errors is in lines of its own, "CASE text:NAME ..."; grep -v ' text:' leaves them out. A case
   depends on its number only, and each part of it draws from a row of its own, so that one difference does not spread.

   The record must not depend on the compiler either: no two draws in one expression, no sums of doubles, and divisions
   by powers of two only. */

#define CHUNKFLOW_IMPLEMENTATION
#include "chunkflow.h"
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
    cf_error error = {0};
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
    cf_schedule_desc schedule; /* kind, report, n_virtual and replay aside */
    int64_t n_virtual;         /* of the kinds that take several */
    int through_pipeline;      /* paper replays that way */
    int64_t limits[MOST_STAGES];
    int64_t limits_bytes[MOST_STAGES];
} batch;

static cf_pass_cost draw_cost(void) {
    cf_pass_cost cost = {0};
    if (!one_in(3)) cost.per_token = real_below(0.0078125);
    if (one_in(2)) cost.constant = real_below(2);
    if (one_in(2)) cost.per_pair = real_below(0.0000152587890625);
    if (one_in(5)) cost.constant = (double)between(1, 5);
    return cost;
}

static cf_stage_cost draw_stage_cost(void) {
    cf_stage_cost cost = {0};
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
    if (b->timing.stages) memset(&b->timing.all, 0, sizeof b->timing.all);
    if (one_in(2)) b->timing.latency = one_in(2) ? real_below(3) : (double)between(1, 4);
    if (one_in(3)) b->timing.seconds_per_token = real_below(0.015625);
    if (one_in(2)) (void)real_below(0.0078125); /* what is drawn after it stays as it was recorded before */
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
        desc->limits.per_token.activations = between(1, 40);
        desc->limits.per_token.state = between(0, 10);
        desc->limits.per_token.state_gradient = between(0, 10);
        desc->limits.per_token.boundary = between(0, 4);
    }
    for (i = 0; i < MOST_STAGES; i++) {
        b->limits[i] = between(1, 9);
        b->limits_bytes[i] = between(10, 500) * size;
    }
    if (style == 0) desc->limits.chunks = CF_NO_LIMIT; /* 1 and 2: what holds by default */
    if (style == 3 || style == 4) desc->limits.chunks = between(1, 9);
    if (style == 5) desc->limits.chunks_by_stage = b->limits;
    if (style == 6) desc->limits.bytes = between(10, 500) * size;
    if (style == 7) desc->limits.bytes_by_stage = b->limits_bytes;
}

static void draw_schedule(batch *b) {
    cf_schedule_desc *desc = &b->schedule;
    memset(desc, 0, sizeof *desc);
    desc->shape.n_stages = one_in(8) ? between(6, 8) : between(0, 5);
    b->through_pipeline = !one_in(3);
    desc->shape.k = between(0, 5);
    desc->shape.rank = between(0, (b->pack.n_ranks ? b->pack.n_ranks : 1) - 1);
    desc->split_backward = one_in(2);
    desc->max_tries = one_in(6) ? between(40, 120) : between(1, 30);
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
    number("chunks_per_rank", p->chunks_per_rank);
    number("n_chunks", p->n_chunks);
    number("n_idle", p->n_idle);
    number("n_chains", p->n_chains);
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
        number("rows", c->rows);
        number("pairs", c->pairs);
        number("chain", c->chain);
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
    for (i = 0; i < p->n_chains; i++) {
        row("chain", i);
        number("sequence", p->chains[i].sequence);
        number("first_chunk", p->chains[i].first_chunk);
        number("n_chunks", p->chains[i].n_chunks);
        number("tokens", p->chains[i].tokens);
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
    number("replay", (int64_t)s->shape.replay);
    number("n_stages", s->shape.n_stages);
    number("n_virtual", s->shape.n_virtual);
    number("k", s->shape.k);
    number("rank", s->shape.rank);
    number("n_chunks", s->n_chunks);
    number("n_actions", s->n_actions);
    number("lowered", s->lowered);
    for (i = 0; i <= s->shape.n_stages; i++) {
        row("first", i);
        number("at", s->first[i]);
    }
    for (i = 0; s->limits.chunks_by_stage && i < s->shape.n_stages; i++) {
        row("limit", i);
        number("chunks", s->limits.chunks_by_stage[i]);
    }
    for (i = 0; i < s->n_actions; i++) {
        row("action", i);
        add_action(&s->actions[i]);
    }
}

static void add_report(const cf_search_report *r) {
    row("report", r->max_tries);
    number("n_tried", r->n_tried);
    number("n_improved", r->n_improved);
    number("best_fixed", (int64_t)r->best_fixed);
    real("fixed_makespan", r->fixed_makespan);
    real("makespan", r->makespan);
    real("bound", r->bound);
    real("gap", r->gap);
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
static void record_timeline(const batch *b, const cf_plan *plan, const cf_schedule *schedule, const char *name) {
    cf_simulate_desc desc = {0};
    cf_timeline *timeline = NULL;
    cf_error error = no_error();
    cf_result code;
    desc.timing = b->schedule.timing;
    desc.limits.per_token = b->schedule.limits.per_token;
    desc.limits.chunks = b->schedule.limits.chunks;
    desc.limits.chunks_by_stage = b->schedule.limits.chunks_by_stage;
    code = cf_simulate(plan, schedule, &desc, &timeline, &error);
    begin("timeline.%s", name);
    if (code == CF_OK) {
        add_timeline(timeline);
        note_real("makespan", timeline->makespan);
    }
    finish(code, &error);
    if (code != CF_OK) return;
    begin("bounds.%s", name);
    add_bounds(timeline);
    finish(CF_OK, NULL);
    cf_timeline_free(timeline);
}

static cf_schedule *record_schedule(const batch *b, const cf_plan *plan, cf_schedule_kind kind, const char *name,
                                    int64_t *wanted) {
    cf_schedule_desc desc = b->schedule;
    cf_search_report report;
    cf_schedule *schedule = NULL;
    cf_error error = no_error();
    cf_result code;
    desc.kind = kind;
    if (kind < CF_SCHEDULE_ZERO_BUBBLE) desc.split_backward = 0; /* which those would refuse */
    desc.report = &report;
    if (kind == CF_SCHEDULE_PAPER && b->through_pipeline) desc.shape.replay = CF_REPLAY_PIPELINE;
    if (kind == CF_SCHEDULE_INTERLEAVED || kind == CF_SCHEDULE_BEST) desc.shape.n_virtual = b->n_virtual;
    memset(&report, 0, sizeof report);
    code = cf_schedule_make(plan, &desc, &schedule, &error);
    begin("schedule.%s", name);
    if (code == CF_OK) add_schedule(schedule);
    if (code == CF_OK && (kind == CF_SCHEDULE_BEST || kind == CF_SCHEDULE_PAPER)) add_report(&report);
    finish(code, &error);
    if (wanted) *wanted = code == CF_ERROR_INFEASIBLE && b->schedule.limits.chunks > 0 ? error.wanted : 0;
    return schedule;
}

/* Under a limit that is too low, the least that would do is tried as well. */
static void record_kind(const batch *b, const cf_plan *plan, cf_schedule_kind kind) {
    char name[40];
    int64_t wanted = 0;
    cf_schedule *schedule;
    snprintf(name, sizeof name, "%s", cf_schedule_kind_name(kind));
    schedule = record_schedule(b, plan, kind, name, &wanted);
    if (!schedule && wanted > 0) {
        batch wider = *b;
        wider.schedule.limits.chunks = wanted;
        snprintf(name, sizeof name, "%s-least", cf_schedule_kind_name(kind));
        schedule = record_schedule(&wider, plan, kind, name, NULL);
    }
    if (schedule) record_timeline(b, plan, schedule, name);
    cf_schedule_free(schedule);
}

static void record_schedules(const batch *b, const cf_plan *plan) {
    int kind;
    for (kind = CF_SCHEDULE_PAPER; kind <= CF_SCHEDULE_BEST; kind++) record_kind(b, plan, (cf_schedule_kind)kind);
}

static void record_case(void) {
    batch b;
    cf_plan *plan;
    cf_pass_cost cost;
    int64_t tokens, pairs;
    draw_batch(&b);
    plan = record_plan(&b);
    if (plan) record_schedules(&b, plan);
    cf_plan_free(plan);
    begin_part(1);
    cost = draw_cost();
    tokens = between(0, 1 << 24);
    pairs = between(0, (int64_t)1 << 40);
    begin("cost");
    real("seconds", cf_cost_seconds(&cost, tokens, pairs));
    finish(CF_OK, NULL);
}

static void record_cases(int first, int count) {
    for (record.case_id = first; record.case_id < first + count; record.case_id++) record_case();
}

int main(int argc, char **argv) {
    record.full = argc == 3 && strcmp(argv[1], "--full") == 0;
    record.quiet = argc == 3 && strcmp(argv[1], "--hash") == 0;
    if (argc != 1 && argc != 3) {
        fprintf(stderr, "usage: record [FIRST COUNT | --full CASE | --hash COUNT]\n");
        return 2;
    }
    if (record.full) record_cases(atoi(argv[2]), 1);
    else if (record.quiet) record_cases(0, atoi(argv[2]));
    else record_cases(argc == 3 ? atoi(argv[1]) : 0, argc == 3 ? atoi(argv[2]) : 2000);
    if (record.quiet) printf("%d cases %016llx\n", atoi(argv[2]), (unsigned long long)record.all);
    return 0;
}
