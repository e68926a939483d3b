/* saved.c - reads plans and schedules from JSON. */

#include "saved.h"
#include "schedule_new.h"

#include <stdlib.h>
#include <string.h>

/* The file contradicts itself. */
static int contradicts(const json_document *document, uint32_t node, const char *name, int64_t says, int64_t is) {
    json_wrong(document, node, "%s: says %lld, there are %lld", name, (long long)says, (long long)is);
    return CLI_FAILED;
}

static int no_memory(const json_document *document) {
    return cli_failed("out of memory for %s", cli_input_name(document->path));
}

/* Allocates at least one byte, so that NULL always means lack of memory. */
static void *new_array(int64_t n, size_t size) {
    return (uint64_t)n < PTRDIFF_MAX / size ? calloc((size_t)n + 1, size) : NULL;
}

static const char *format_word(int64_t place) {
    static const char *const words[] = {"chunkflow-plan", "chunkflow-schedule", "chunkflow-schedules"};
    return place <= SAVED_SCHEDULES ? words[place] : "?";
}

typedef struct header {
    int64_t format, version;
} header;

static const json_field header_fields[] = {
    {.name = "format", .type = JSON_WORD, .offset = offsetof(header, format), .word = format_word},
    {.name = "version", .type = JSON_INT, .offset = offsetof(header, version)},
    {.name = NULL}};

static int format_of(const json_document *document, uint32_t node, saved_format *out) {
    header head;
    int code = json_read_object(document, node, header_fields, &head, NULL);

    if (code != CLI_OK) return code;
    if (head.version != CF_JSON_VERSION)
        return json_wrong(document, node, "version: got %lld, wanted %d%s", (long long)head.version, CF_JSON_VERSION,
                          head.version >= 1 && head.version < CF_JSON_VERSION
                              ? ": an older chunkflow wrote it; write it anew with this one" : "");
    *out = (saved_format)head.format;
    return CLI_OK;
}

int saved_format_of(const json_document *document, saved_format *out) {
    return format_of(document, 0, out);
}

/* ----------------------------------------------------------------------------------------------------------------
   Plans
   ---------------------------------------------------------------------------------------------------------------- */

static const char *method_word(int64_t place) { return cf_pack_method_name((cf_pack_method)place); }
static const char *split_word(int64_t place) { return cf_split_method_name((cf_split_method)place); }

typedef struct plan_object {
    cf_plan plan;
    int64_t method, split;
    uint32_t chains, chunks;
    uint32_t order, common, lengths; /* if sequences share rows; else 0 */
} plan_object;

#define PLAN_COUNT(member) {.name = #member, .type = JSON_INT, .offset = offsetof(plan_object, plan.member)}

static const json_field plan_fields[] = {
    PLAN_COUNT(chunk_size), PLAN_COUNT(align), PLAN_COUNT(max_slices), PLAN_COUNT(n_sequences), PLAN_COUNT(n_empty),
    PLAN_COUNT(n_tokens), PLAN_COUNT(n_ranks), PLAN_COUNT(chunks_per_rank), PLAN_COUNT(n_chunks), PLAN_COUNT(n_idle),
    PLAN_COUNT(n_chains), PLAN_COUNT(n_slices), PLAN_COUNT(lower_bound),
    {.name = "method", .type = JSON_WORD, .offset = offsetof(plan_object, method), .word = method_word},
    {.name = "split", .type = JSON_WORD, .offset = offsetof(plan_object, split), .word = split_word},
    {.name = "chains", .type = JSON_ARRAY_OF, .offset = offsetof(plan_object, chains)},
    {.name = "chunks", .type = JSON_ARRAY_OF, .offset = offsetof(plan_object, chunks)},
    {.name = "order", .type = JSON_ARRAY_OF, .offset = offsetof(plan_object, order), .optional = 1},
    {.name = "common", .type = JSON_ARRAY_OF, .offset = offsetof(plan_object, common), .optional = 1},
    {.name = "lengths", .type = JSON_ARRAY_OF, .offset = offsetof(plan_object, lengths), .optional = 1},
    {.name = NULL}};

typedef struct chain_object {
    cf_chain chain;
    int64_t id;
} chain_object;

#define CHAIN_COUNT(member) {.name = #member, .type = JSON_INT, .offset = offsetof(chain_object, chain.member)}

static const json_field chain_fields[] = {
    {.name = "id", .type = JSON_INT, .offset = offsetof(chain_object, id)},
    CHAIN_COUNT(sequence), CHAIN_COUNT(first_chunk), CHAIN_COUNT(n_chunks), CHAIN_COUNT(tokens), CHAIN_COUNT(cp),
    {.name = NULL}};

typedef struct chunk_object {
    cf_chunk chunk;
    int64_t id;
    uint32_t slices;
} chunk_object;

#define CHUNK_COUNT(member) {.name = #member, .type = JSON_INT, .offset = offsetof(chunk_object, chunk.member)}

static const json_field chunk_fields[] = {
    {.name = "id", .type = JSON_INT, .offset = offsetof(chunk_object, id)},
    CHUNK_COUNT(chain), CHUNK_COUNT(index), CHUNK_COUNT(prefix), CHUNK_COUNT(tokens), CHUNK_COUNT(rows),
    CHUNK_COUNT(pairs), CHUNK_COUNT(rank), CHUNK_COUNT(up), CHUNK_COUNT(down), CHUNK_COUNT(below), CHUNK_COUNT(state),
    CHUNK_COUNT(cp),
    {.name = "slices", .type = JSON_ARRAY_OF, .offset = offsetof(chunk_object, slices)},
    {.name = NULL}};

#define SLICE_COUNT(member) {.name = #member, .type = JSON_INT32, .offset = offsetof(cf_slice, member)}
#define SLICE_COUNTS                                                                                 \
    SLICE_COUNT(sequence), {.name = "begin", .type = JSON_INT, .offset = offsetof(cf_slice, begin)}, \
        SLICE_COUNT(length), SLICE_COUNT(offset), SLICE_COUNT(up)

static const json_field slice_fields[] = {SLICE_COUNTS, {.name = NULL}};
static const json_field shared_slice_fields[] = {SLICE_COUNTS, SLICE_COUNT(first), SLICE_COUNT(n), {.name = NULL}};

/* Returns the largest possible number of slices in a document: each is an object with at least five names and five
   values. */
static int64_t most_slices(const json_document *document) {
    return document->n_nodes / 11;
}

static int read_chains(const json_document *document, uint32_t array, cf_plan *plan) {
    uint32_t node;
    int64_t n = 0;

    for (node = array + 1; node < document->nodes[array].next; node = document->nodes[node].next, n++) {
        chain_object object;
        int code = json_read_object(document, node, chain_fields, &object, NULL);
        if (code != CLI_OK) return code;
        if (object.id != n) return contradicts(document, node, "id of a chain", object.id, n);
        plan->chains[n] = object.chain;
    }
    return CLI_OK;
}

static int read_slices(const json_document *document, uint32_t array, cf_plan *plan, int64_t *n) {
    uint32_t node;
    int code = CLI_OK;

    for (node = array + 1; node < document->nodes[array].next && code == CLI_OK; node = document->nodes[node].next) {
        cf_slice *slice = &plan->slices[(*n)++];
        code = json_read_object(document, node, plan->order ? shared_slice_fields : slice_fields, slice, NULL);
        if (!plan->order) slice->first = slice->sequence;
        if (!plan->order) slice->n = 1;
    }
    return code;
}

static int read_chunks(const json_document *document, uint32_t array, cf_plan *plan, int64_t *n_slices) {
    uint32_t node;
    int64_t n = 0;
    int code = CLI_OK;

    for (node = array + 1; node < document->nodes[array].next && code == CLI_OK; node = document->nodes[node].next) {
        chunk_object object = {.id = -1};
        cf_chunk *chunk = &plan->chunks[n];
        code = json_read_object(document, node, chunk_fields, &object, NULL);
        if (code != CLI_OK) return code;
        if (object.id != n) return contradicts(document, node, "id of a chunk", object.id, n);
        n++;
        *chunk = object.chunk;
        chunk->first_slice = *n_slices;
        chunk->n_slices = json_count(document, object.slices);
        if (chunk->n_slices > most_slices(document) - *n_slices)
            return json_wrong(document, object.slices, "slices: wanted objects with five members");
        code = read_slices(document, object.slices, plan, n_slices);
    }
    return code;
}

/* Sums the lengths of sequences. It ignores numbers that are not a sequence's, or that would overflow: cf_plan_validate
   then finds lengths that do not match. */
static void sum_lengths(saved_plan *saved) {
    int64_t i;

    for (i = 0; i < saved->plan.n_slices; i++) {
        const cf_slice *slice = &saved->plan.slices[i];
        int64_t *length;
        if (slice->sequence < 0 || slice->sequence >= saved->plan.n_sequences) continue;
        length = &saved->lengths[slice->sequence];
        if (slice->length > 0 && slice->length <= CF_MAX_LENGTH - *length) *length += slice->length;
    }
}

/* Reads n numbers into a new array; NULL if the file has none. */
static int read_counts(const json_document *document, uint32_t array, const char *name, const char *of, int64_t n,
                       int64_t **out) {
    uint32_t node;
    int64_t at = 0;
    int code = CLI_OK;

    if (array == 0) return CLI_OK;
    if (json_count(document, array) != n) return contradicts(document, array, of, n, json_count(document, array));
    *out = (int64_t *)new_array(n, sizeof **out);
    if (!*out) return no_memory(document);
    for (node = array + 1; node < document->nodes[array].next && code == CLI_OK; node = document->nodes[node].next)
        code = json_read_int(document, node, name, &(*out)[at++]);
    return code;
}

/* Reads the members of a plan whose sequences share rows: all three, or none. */
static int read_shared(const json_document *document, const plan_object *object, cf_plan *plan) {
    int64_t n = plan->n_sequences;
    int code;

    if (object->order == 0 && object->common == 0 && object->lengths == 0) return CLI_OK;
    if (object->order == 0 || object->common == 0 || object->lengths == 0)
        return json_wrong(document, 0, "%s is missing, in a plan whose sequences share rows",
                          object->order == 0 ? "order" : object->common == 0 ? "common" : "lengths");
    code = read_counts(document, object->order, "order", "n_sequences", n, &plan->order);
    if (code == CLI_OK) code = read_counts(document, object->common, "common", "n_sequences", n, &plan->common);
    if (code == CLI_OK) code = read_counts(document, object->lengths, "lengths", "n_sequences", n, &plan->lengths);
    return code;
}

static int read_arrays(const json_document *document, const plan_object *object, saved_plan *saved) {
    cf_plan *plan = &saved->plan;
    int64_t n_slices = 0;
    int code;

    plan->chains = (cf_chain *)new_array(plan->n_chains, sizeof *plan->chains);
    plan->chunks = (cf_chunk *)new_array(plan->n_chunks, sizeof *plan->chunks);
    plan->slices = (cf_slice *)new_array(most_slices(document), sizeof *plan->slices);
    saved->lengths = (int64_t *)new_array(plan->n_sequences, sizeof *saved->lengths);
    if (!plan->chains || !plan->chunks || !plan->slices || !saved->lengths) return no_memory(document);
    code = read_shared(document, object, plan);
    if (code == CLI_OK) code = read_chains(document, object->chains, plan);
    if (code == CLI_OK) code = read_chunks(document, object->chunks, plan, &n_slices);
    if (code == CLI_OK && n_slices != plan->n_slices)
        code = contradicts(document, 0, "n_slices", plan->n_slices, n_slices);
    if (code != CLI_OK) return code;
    if (plan->lengths) memcpy(saved->lengths, plan->lengths, (size_t)plan->n_sequences * sizeof *plan->lengths);
    else sum_lengths(saved);
    return CLI_OK;
}

int saved_plan_read(const json_document *document, saved_plan *out) {
    saved_plan fresh;
    plan_object object;
    int64_t n_chains, n_chunks;
    int code;

    memset(&fresh, 0, sizeof fresh);
    memset(&object, 0, sizeof object);
    code = json_read_object(document, 0, plan_fields, &object, NULL);
    if (code != CLI_OK) return code;
    n_chains = json_count(document, object.chains);
    n_chunks = json_count(document, object.chunks);
    if (n_chains != object.plan.n_chains)
        return contradicts(document, object.chains, "n_chains", object.plan.n_chains, n_chains);
    if (n_chunks != object.plan.n_chunks)
        return contradicts(document, object.chunks, "n_chunks", object.plan.n_chunks, n_chunks);
    if (object.plan.n_sequences < 0 || object.plan.n_sequences > CLI_MAX_SEQUENCES)
        return json_wrong(document, 0, "n_sequences: got %lld, wanted 0 .. %lld", (long long)object.plan.n_sequences,
                          (long long)CLI_MAX_SEQUENCES);
    if (object.plan.n_empty < 0 ||
        (object.order == 0 && object.plan.n_sequences - object.plan.n_empty > most_slices(document)))
        return json_wrong(document, 0, "n_sequences: got %lld, n_empty: %lld, but all others have a slice",
                          (long long)object.plan.n_sequences, (long long)object.plan.n_empty);
    fresh.plan = object.plan;
    fresh.plan.method = (cf_pack_method)object.method;
    fresh.plan.split = (cf_split_method)object.split;
    code = read_arrays(document, &object, &fresh);
    if (code == CLI_OK) *out = fresh;
    else saved_plan_free(&fresh);
    return code;
}

void saved_plan_free(saved_plan *saved) {
    free(saved->plan.chains);
    free(saved->plan.chunks);
    free(saved->plan.slices);
    free(saved->plan.order);
    free(saved->plan.common);
    free(saved->plan.lengths);
    free(saved->lengths);
    memset(saved, 0, sizeof *saved);
}

/* ----------------------------------------------------------------------------------------------------------------
   Schedules
   ---------------------------------------------------------------------------------------------------------------- */

static const char *kind_word(int64_t place) { return cf_schedule_kind_name((cf_schedule_kind)place); }
static const char *replay_word(int64_t place) { return cf_replay_name((cf_replay)place); }
static const char *placement_word(int64_t place) { return cf_placement_name((cf_placement)place); }
static const char *pass_word(int64_t place) { return cf_pass_name((cf_pass)place); }

typedef struct schedule_object {
    cf_schedule schedule;
    cf_timeline timeline;
    int64_t kind, replay, placement, lowered;
    int64_t lockstep, forward_only, outputs;
    uint32_t actions, bounds, peak_live, peak_tokens, peak_state_tokens, peak_bytes; /* nodes; 0: not there */
    uint32_t limits, state_limits, byte_limits, token_bytes;
} schedule_object;

#define SCHEDULE_COUNT(key, member) {.name = key, .type = JSON_INT, .offset = offsetof(schedule_object, member)}
#define SCHEDULE_TIME(member) \
    {.name = #member, .type = JSON_REAL, .offset = offsetof(schedule_object, timeline.member), .optional = 1}
#define SCHEDULE_PEAK(member) \
    {.name = #member, .type = JSON_ARRAY_OF, .offset = offsetof(schedule_object, member), .optional = 1}
#define N_TIMES 6 /* members that exist all or not at all, first in the table */

static const json_field schedule_fields[] = {
    SCHEDULE_TIME(makespan), SCHEDULE_TIME(busy), SCHEDULE_TIME(replayed), SCHEDULE_TIME(bubble_useful),
    SCHEDULE_TIME(bubble_busy), SCHEDULE_PEAK(peak_live),
    {.name = "kind", .type = JSON_WORD, .offset = offsetof(schedule_object, kind), .word = kind_word},
    {.name = "replay", .type = JSON_WORD, .offset = offsetof(schedule_object, replay), .word = replay_word},
    {.name = "placement", .type = JSON_WORD, .offset = offsetof(schedule_object, placement), .word = placement_word},
    SCHEDULE_COUNT("stages", schedule.shape.n_stages),
    SCHEDULE_COUNT("virtual_stages", schedule.shape.n_virtual),
    SCHEDULE_COUNT("k", schedule.shape.k), SCHEDULE_COUNT("rank", schedule.shape.rank),
    SCHEDULE_COUNT("n_chunks", schedule.n_chunks), SCHEDULE_COUNT("n_actions", schedule.n_actions),
    SCHEDULE_COUNT("lowered", lowered),
    {.name = "lockstep", .type = JSON_INT, .offset = offsetof(schedule_object, lockstep), .optional = 1},
    {.name = "forward_only", .type = JSON_INT, .offset = offsetof(schedule_object, forward_only), .optional = 1},
    {.name = "outputs", .type = JSON_INT, .offset = offsetof(schedule_object, outputs), .optional = 1},
    {.name = "actions", .type = JSON_ARRAY_OF, .offset = offsetof(schedule_object, actions)},
    SCHEDULE_PEAK(limits), SCHEDULE_PEAK(state_limits), SCHEDULE_PEAK(byte_limits),
    {.name = "token_bytes", .type = JSON_OBJECT_OF, .offset = offsetof(schedule_object, token_bytes), .optional = 1},
    {.name = "bounds", .type = JSON_OBJECT_OF, .offset = offsetof(schedule_object, bounds), .optional = 1},
    SCHEDULE_PEAK(peak_tokens), SCHEDULE_PEAK(peak_state_tokens), SCHEDULE_PEAK(peak_bytes),
    SCHEDULE_TIME(stream_seconds),
    {.name = "stream_waits", .type = JSON_INT, .offset = offsetof(schedule_object, timeline.stream_waits),
     .optional = 1},
    {.name = NULL}};

typedef struct action_object {
    int64_t pass;
    int32_t chunk, stage, live;
    int keep;
    double start, end;
} action_object;

enum { ACTION_START, ACTION_END, ACTION_LIVE, ACTION_KEEP }; /* places in the table */

static const json_field action_fields[] = {
    [ACTION_START] = {.name = "start", .type = JSON_REAL, .offset = offsetof(action_object, start), .optional = 1},
    [ACTION_END] = {.name = "end", .type = JSON_REAL, .offset = offsetof(action_object, end), .optional = 1},
    [ACTION_LIVE] = {.name = "live", .type = JSON_INT32, .offset = offsetof(action_object, live), .optional = 1},
    [ACTION_KEEP] = {.name = "keep", .type = JSON_BOOL, .offset = offsetof(action_object, keep), .optional = 1},
    {.name = "pass", .type = JSON_WORD, .offset = offsetof(action_object, pass), .word = pass_word},
    {.name = "chunk", .type = JSON_INT32, .offset = offsetof(action_object, chunk)},
    {.name = "stage", .type = JSON_INT32, .offset = offsetof(action_object, stage)},
    {.name = NULL}};

static int read_action(const json_document *document, uint32_t node, saved_schedule *saved, int64_t n) {
    const uint64_t times = (uint64_t)1 << ACTION_START | (uint64_t)1 << ACTION_END | (uint64_t)1 << ACTION_LIVE;
    cf_action *action = &saved->schedule->actions[n];
    action_object object;
    uint64_t seen;
    int code, keeps;

    memset(&object, 0, sizeof object);
    code = json_read_object(document, node, action_fields, &object, &seen);
    if (code != CLI_OK) return code;
    keeps = object.pass == CF_F || object.pass == CF_R;
    if ((seen >> ACTION_KEEP & 1) != (uint64_t)keeps)
        return json_wrong(document, node, keeps ? "keep is missing" : "keep: only F and R keep something");
    if (saved->has_times && (seen & times) != times)
        return json_wrong(document, node, "start, end or live is missing, in a schedule with a makespan");
    action->chunk = object.chunk;
    action->stage = object.stage;
    action->pass = (uint8_t)object.pass;
    action->keep = (uint8_t)object.keep;
    if (saved->has_times) {
        saved->timeline.start[n] = object.start;
        saved->timeline.end[n] = object.end;
        saved->timeline.live[n] = object.live;
    }
    return CLI_OK;
}

static int read_lists(const json_document *document, uint32_t array, saved_schedule *saved) {
    cf_schedule *schedule = saved->schedule;
    uint32_t list, node;
    int64_t stage = 0, n = 0;
    int code;

    for (list = array + 1; list < document->nodes[array].next; list = document->nodes[list].next) {
        schedule->first[stage++] = n;
        for (node = list + 1; node < document->nodes[list].next; node = document->nodes[node].next) {
            code = read_action(document, node, saved, n++);
            if (code != CLI_OK) return code;
        }
    }
    schedule->first[stage] = n;
    return CLI_OK;
}

typedef struct bounds_object {
    double values[CF_MAX_BOUNDS];
} bounds_object;

#define BOUND(key, place) \
    {.name = key, .type = JSON_REAL, .offset = offsetof(bounds_object, values[place]), .optional = 1}

static const json_field bound_fields[] = {
    BOUND("critical-path", 0), BOUND("stage-load", 1), BOUND("memory", 2), {.name = NULL}};

static int read_bounds(const json_document *document, uint32_t node, cf_timeline *timeline) {
    bounds_object object;
    uint64_t seen;
    int code, i;

    if (node == 0) return CLI_OK;
    code = json_read_object(document, node, bound_fields, &object, &seen);
    for (i = 0; i < CF_MAX_BOUNDS && code == CLI_OK; i++) {
        if (!(seen >> i & 1)) continue;
        timeline->bounds[timeline->n_bounds].name = bound_fields[i].name;
        timeline->bounds[timeline->n_bounds++].value = object.values[i];
    }
    return code;
}

static int read_summary(const json_document *document, const schedule_object *object, saved_schedule *saved) {
    cf_timeline *timeline = &saved->timeline;
    const struct {
        const char *name;
        uint32_t array;
        int64_t **out;
    } peaks[] = {{"peak_live", object->peak_live, &timeline->peak_live},
                 {"peak_tokens", object->peak_tokens, &timeline->peak_tokens},
                 {"peak_state_tokens", object->peak_state_tokens, &timeline->peak_state_tokens},
                 {"peak_bytes", object->peak_bytes, &timeline->peak_bytes}};
    int code = read_bounds(document, object->bounds, timeline), i;

    for (i = 0; i < 4 && code == CLI_OK; i++)
        code = read_counts(document, peaks[i].array, peaks[i].name, "stages", saved->schedule->shape.n_stages,
                           peaks[i].out);
    return code;
}

/* Checks that the counts of the file are those of its lists. */
static int check_lists(const json_document *document, const schedule_object *object) {
    uint32_t list;
    int64_t n_stages = json_count(document, object->actions), n = 0;

    if (n_stages != object->schedule.shape.n_stages)
        return contradicts(document, object->actions, "stages", object->schedule.shape.n_stages, n_stages);
    for (list = object->actions + 1; list < document->nodes[object->actions].next; list = document->nodes[list].next) {
        if (document->nodes[list].kind != JSON_ARRAY)
            return json_wrong(document, list, "actions: wanted an array for each stage");
        n += json_count(document, list);
    }
    if (n != object->schedule.n_actions)
        return contradicts(document, object->actions, "n_actions", object->schedule.n_actions, n);
    return CLI_OK;
}

static const json_field bytes_fields[] = {
    {.name = "activations", .type = JSON_INT, .offset = offsetof(cf_held_bytes, activations)},
    {.name = "state", .type = JSON_INT, .offset = offsetof(cf_held_bytes, state)},
    {.name = "state_gradient", .type = JSON_INT, .offset = offsetof(cf_held_bytes, state_gradient)},
    {.name = "boundary", .type = JSON_INT, .offset = offsetof(cf_held_bytes, boundary)},
    {.name = NULL}};

/* Limits by stage, in the order of the members of cf_limits. */
enum { LIMIT_KINDS = 3 };

static int read_limits(const json_document *document, const schedule_object *object, int64_t *by_stage[LIMIT_KINDS],
                       cf_limits *out) {
    int64_t n = object->schedule.shape.n_stages;
    int code = read_counts(document, object->limits, "limits", "stages", n, &by_stage[0]);

    if (code == CLI_OK) code = read_counts(document, object->state_limits, "state_limits", "stages", n, &by_stage[1]);
    if (code == CLI_OK) code = read_counts(document, object->byte_limits, "byte_limits", "stages", n, &by_stage[2]);
    if (code == CLI_OK && object->token_bytes != 0)
        code = json_read_object(document, object->token_bytes, bytes_fields, &out->per_token, NULL);
    out->chunks_by_stage = by_stage[0];
    out->state_by_stage = by_stage[1];
    out->bytes_by_stage = by_stage[2];
    return code;
}

/* Makes the schedule without its lists. */
static int make_schedule(const json_document *document, const schedule_object *object, cf_schedule **out) {
    cf_schedule bare = object->schedule;
    int64_t *by_stage[LIMIT_KINDS] = {NULL, NULL, NULL};
    int code = read_limits(document, object, by_stage, &bare.limits), i;

    bare.kind = (cf_schedule_kind)object->kind;
    bare.shape.replay = (cf_replay)object->replay;
    bare.shape.placement = (cf_placement)object->placement;
    bare.lowered = (int)object->lowered;
    bare.lockstep = (int)object->lockstep;
    bare.shape.forward_only = (int)object->forward_only;
    bare.shape.outputs = (int)object->outputs;
    if (code == CLI_OK && schedule_new(&bare, NULL, out, NULL) != CF_OK) code = no_memory(document);
    for (i = 0; i < LIMIT_KINDS; i++) free(by_stage[i]);
    return code;
}

static int make_timeline(const json_document *document, const cf_schedule *schedule, saved_schedule *saved) {
    cf_timeline *timeline = &saved->timeline;

    if (!saved->has_times) return CLI_OK;
    timeline->n_actions = schedule->n_actions;
    timeline->n_stages = schedule->shape.n_stages;
    timeline->start = (double *)new_array(schedule->n_actions, sizeof *timeline->start);
    timeline->end = (double *)new_array(schedule->n_actions, sizeof *timeline->end);
    timeline->live = (int32_t *)new_array(schedule->n_actions, sizeof *timeline->live);
    return timeline->start && timeline->end && timeline->live ? CLI_OK : no_memory(document);
}

typedef struct schedules_object {
    int64_t n_ranks;
    uint32_t schedules;
} schedules_object;

static const json_field schedules_fields[] = {
    {.name = "n_ranks", .type = JSON_INT, .offset = offsetof(schedules_object, n_ranks)},
    {.name = "schedules", .type = JSON_ARRAY_OF, .offset = offsetof(schedules_object, schedules)},
    {.name = NULL}};

int saved_schedules_find(const json_document *document, uint32_t *array) {
    schedules_object object;
    saved_format format;
    uint32_t node;
    int code = json_read_object(document, 0, schedules_fields, &object, NULL);

    if (code != CLI_OK) return code;
    if (object.n_ranks != json_count(document, object.schedules))
        return contradicts(document, 0, "n_ranks", object.n_ranks, json_count(document, object.schedules));
    for (node = object.schedules + 1; node < document->nodes[object.schedules].next;
         node = document->nodes[node].next) {
        code = format_of(document, node, &format);
        if (code != CLI_OK) return code;
        if (format != SAVED_SCHEDULE) return json_wrong(document, node, "schedules: wanted schedules");
    }
    *array = object.schedules;
    return CLI_OK;
}

int saved_schedule_read(const json_document *document, uint32_t node, saved_schedule *out) {
    const uint64_t all_times = ((uint64_t)1 << N_TIMES) - 1;
    saved_schedule fresh;
    schedule_object object;
    uint64_t seen;
    int code;

    memset(&fresh, 0, sizeof fresh);
    memset(&object, 0, sizeof object);
    code = json_read_object(document, node, schedule_fields, &object, &seen);
    if (code != CLI_OK) return code;
    if ((seen & all_times) != 0 && (seen & all_times) != all_times)
        return json_wrong(document, node,
                          "of makespan, busy, replayed, bubble_useful, bubble_busy and peak_live some are missing");
    if (object.lowered < 0 || object.lowered > 1)
        return json_wrong(document, node, "lowered: got %lld, wanted 0 or 1", (long long)object.lowered);
    if (object.lockstep < 0 || object.lockstep > 1)
        return json_wrong(document, node, "lockstep: got %lld, wanted 1", (long long)object.lockstep);
    code = check_lists(document, &object);
    if (code != CLI_OK) return code;
    fresh.timeline = object.timeline;
    fresh.has_times = (seen & all_times) != 0;
    code = make_schedule(document, &object, &fresh.schedule);
    if (code == CLI_OK) code = make_timeline(document, fresh.schedule, &fresh);
    if (code == CLI_OK) code = read_lists(document, object.actions, &fresh);
    if (code == CLI_OK && fresh.has_times) code = read_summary(document, &object, &fresh);
    if (code == CLI_OK) *out = fresh;
    else saved_schedule_free(&fresh);
    return code;
}

void saved_schedule_free(saved_schedule *saved) {
    cf_schedule_free(saved->schedule);
    free(saved->timeline.start);
    free(saved->timeline.end);
    free(saved->timeline.live);
    free(saved->timeline.peak_live);
    free(saved->timeline.peak_tokens);
    free(saved->timeline.peak_state_tokens);
    free(saved->timeline.peak_bytes);
    memset(saved, 0, sizeof *saved);
}

/* ----------------------------------------------------------------------------------------------------------------
   Times
   ---------------------------------------------------------------------------------------------------------------- */

typedef struct time_check {
    const cf_plan *plan;
    const cf_schedule *schedule;
    const cf_timeline *timeline;
    double skew;   /* possible difference between the clocks of two stages */
    const cf_schedule_index *index;
    char *why;
    size_t size;
} time_check;

/* Returns when the pass ended whose result an action reads from another virtual stage, or transfers; 0: none. */
static double waits_until(const time_check *c, int64_t id) {
    cf_need needs[CF_MAX_NEEDS];
    int i, n = cf_schedule_needs(c->index, id, needs);

    for (i = 0; i < n; i++)
        if (needs[i].why == CF_EDGE_ACTIVATION || needs[i].why == CF_EDGE_GRADIENT)
            return c->timeline->end[needs[i].action];
    return 0;
}

static int is_send(int pass) { return pass == CF_SEND_F || pass == CF_SEND_R || pass == CF_SEND_B; }

static int times_wrong(const time_check *c, int64_t stage, int64_t id, const char *what, double got, double wanted) {
    snprintf(c->why, c->size, "stage %lld, position %lld: %s: %.9g, wanted %.9g or later", (long long)stage,
             (long long)(id - c->schedule->first[stage]), what, got, wanted);
    return 0;
}

/* Checks a transfer, which runs beside the passes. A RECV may wait long before there is something to receive. A
   transfer's times may come from the clock at either end. */
static int transfer_holds(const time_check *c, int64_t stage, int64_t id) {
    const cf_action *a = &c->schedule->actions[id];
    double start = c->timeline->start[id], end = c->timeline->end[id], made = waits_until(c, id);

    if (is_send(a->pass) && start + c->skew < made)
        return times_wrong(c, stage, id, "starts before what it sends is made", start, made);
    if (end + c->skew < made) return times_wrong(c, stage, id, "ends before what it receives is made", end, made);
    return 1;
}

static int pass_holds(const time_check *c, int64_t stage, int64_t id, double before) {
    double start = c->timeline->start[id], awaited = waits_until(c, id);

    if (start < before) return times_wrong(c, stage, id, "starts before the pass ahead of it ends", start, before);
    if (start + c->skew < awaited)
        return times_wrong(c, stage, id, "starts before what it waits for ends", start, awaited);
    return 1;
}

static int stage_times_hold(const time_check *c, int64_t stage) {
    const double *start = c->timeline->start, *end = c->timeline->end;
    double before = 0;
    int64_t i;

    for (i = c->schedule->first[stage]; i < c->schedule->first[stage + 1]; i++) {
        int is_pass = c->schedule->actions[i].pass < CF_COMPUTE_PASS_COUNT;
        if (start[i] < 0) return times_wrong(c, stage, i, "starts too early", start[i], 0);
        if (end[i] < start[i]) return times_wrong(c, stage, i, "ends before it starts", end[i], start[i]);
        if (is_pass ? !pass_holds(c, stage, i, before) : !transfer_holds(c, stage, i)) return 0;
        if (is_pass) before = end[i];
    }
    return 1;
}

static int sum_wrong(const time_check *c, const char *name, double got, double wanted) {
    snprintf(c->why, c->size, "%s: got %.9g, the actions give %.9g", name, got, wanted);
    return 0;
}

static int is_near(double a, double b, double scale) {
    double difference = a > b ? a - b : b - a;
    return difference <= 1e-9 * scale;
}

static int sums_hold(const time_check *c) {
    const cf_timeline *t = c->timeline;
    double makespan = 0, busy = 0, replayed = 0, area, useful, all;
    int64_t i, stage;

    for (stage = 0; stage < t->n_stages; stage++) {
        int64_t peak = 0;
        for (i = c->schedule->first[stage]; i < c->schedule->first[stage + 1]; i++) {
            double time = t->end[i] - t->start[i];
            if (t->end[i] > makespan) makespan = t->end[i];
            if (t->live[i] > peak) peak = t->live[i];
            if (c->schedule->actions[i].pass < CF_COMPUTE_PASS_COUNT) busy += time;
            if (c->schedule->actions[i].pass == CF_R) replayed += time;
        }
        if (peak != t->peak_live[stage]) return sum_wrong(c, "peak_live", (double)t->peak_live[stage], (double)peak);
    }
    area = makespan * (double)t->n_stages;
    useful = area > 0 ? 1 - (busy - replayed) / area : 0;
    all = area > 0 ? 1 - busy / area : 0;
    if (!is_near(t->makespan, makespan, makespan)) return sum_wrong(c, "makespan", t->makespan, makespan);
    if (!is_near(t->busy, busy, busy)) return sum_wrong(c, "busy", t->busy, busy);
    if (!is_near(t->replayed, replayed, busy)) return sum_wrong(c, "replayed", t->replayed, replayed);
    if (!is_near(t->bubble_useful, useful, 1)) return sum_wrong(c, "bubble_useful", t->bubble_useful, useful);
    if (!is_near(t->bubble_busy, all, 1)) return sum_wrong(c, "bubble_busy", t->bubble_busy, all);
    return 1;
}

static int bounds_hold(const time_check *c) {
    const cf_timeline *t = c->timeline;
    int64_t i;

    for (i = 0; i < t->n_bounds; i++) {
        if (t->bounds[i].value <= t->makespan * (1 + 1e-9)) continue;
        snprintf(c->why, c->size, "bounds: no schedule is shorter than %.9g, says %s, and the makespan is %.9g",
                 t->bounds[i].value, t->bounds[i].name, t->makespan);
        return 0;
    }
    return 1;
}

static int peaks_agree(const time_check *c, const char *name, const int64_t *got, const int64_t *wanted) {
    int64_t stage;

    for (stage = 0; got && stage < c->schedule->shape.n_stages; stage++)
        if (got[stage] != wanted[stage]) {
            snprintf(c->why, c->size, "%s: got %lld on stage %lld, the list gives %lld", name, (long long)got[stage],
                     (long long)stage, (long long)wanted[stage]);
            return 0;
        }
    return 1;
}

static int live_agrees(const time_check *c, const int32_t *wanted) {
    int64_t stage, i;

    for (stage = 0; stage < c->schedule->shape.n_stages; stage++)
        for (i = c->schedule->first[stage]; i < c->schedule->first[stage + 1]; i++)
            if (c->timeline->live[i] != wanted[i]) {
                snprintf(c->why, c->size, "stage %lld, position %lld: live: got %d, the list gives %d",
                         (long long)stage, (long long)(i - c->schedule->first[stage]), (int)c->timeline->live[i],
                         (int)wanted[i]);
                return 0;
            }
    return 1;
}

/* Checks `live` and the peaks. They depend on the lists and not on times, so a simulation gives the right values. */
static int peaks_hold(const time_check *c, const cf_held_bytes *bytes) {
    const cf_timeline *t = c->timeline;
    cf_timeline *lists = NULL;
    cf_simulate_desc desc;
    cf_error error;
    int holds;

    memset(&desc, 0, sizeof desc);
    desc.no_bounds = 1;
    if (bytes) desc.limits.per_token = *bytes;
    if (cf_simulate(c->plan, c->schedule, &desc, &lists, &error) != CF_OK) {
        snprintf(c->why, c->size, "%s", error.text);
        return error.code == CF_ERROR_MEMORY ? -1 : 0;
    }
    holds = live_agrees(c, lists->live) && peaks_agree(c, "peak_live", t->peak_live, lists->peak_live) &&
            peaks_agree(c, "peak_tokens", t->peak_tokens, lists->peak_tokens) &&
            peaks_agree(c, "peak_state_tokens", t->peak_state_tokens, lists->peak_state_tokens);
    if (holds && bytes) holds = peaks_agree(c, "peak_bytes", t->peak_bytes, lists->peak_bytes);
    cf_timeline_free(lists);
    return holds;
}

int saved_times_hold(const cf_plan *plan, const saved_schedule *saved, double skew, const cf_held_bytes *bytes,
                     char *why,
                     size_t size) {
    const cf_schedule *schedule = saved->schedule;
    cf_schedule_index *index = NULL;
    time_check c;
    int64_t i;
    int holds = 1;

    if (cf_schedule_index_make(plan, schedule, NULL, &index, NULL) != CF_OK) return -1;
    c.plan = plan;
    c.schedule = schedule;
    c.timeline = &saved->timeline;
    c.skew = skew;
    c.why = why;
    c.size = size;
    c.index = index;
    for (i = 0; i < schedule->shape.n_stages && holds; i++) holds = stage_times_hold(&c, i);
    cf_schedule_index_free(index);
    if (holds) holds = sums_hold(&c) && bounds_hold(&c);
    return holds ? peaks_hold(&c, bytes) : 0;
}
