/* schedule_csv.c - writes and reads schedules as CSV. */

#include "schedule_csv.h"
#include "schedule_new.h"
#include "text_out.h"

#include <stdio.h>
#include <string.h>

#define TRY(call)                         \
    do {                                  \
        cf_result tried = (call);         \
        if (tried != CF_OK) return tried; \
    } while (0)

static const char *const extra_names[SCHEDULE_CSV_EXTRA_COUNT] = {
#define NAME_OF(value, name) name,
    SCHEDULE_CSV_EXTRAS(NAME_OF)
#undef NAME_OF
};

static cf_result check_choice(const char *field, int64_t got, int64_t count, cf_error *error) {
    if (got >= 0 && got < count) return CF_OK;
    return cf_fail(error, CF_ERROR_ARGUMENT, field, -1, got < 0 ? 0 : count - 1, got, "there is no such choice");
}

static int is_transfer(const cf_action *a) { return a->pass >= CF_COMPUTE_PASS_COUNT; }

/* Returns 1 for a transfer, or the wait for one: it has a chunk, and occurs only in files with transfers. */
static int is_of_transfers(int kind) { return kind >= SCHEDULE_CSV_WAIT_SEND_F; }

/* ----------------------------------------------------------------------------------------------------------------
   Microbatches
   ---------------------------------------------------------------------------------------------------------------- */

/* Numbers the chunks of a sound schedule, which has one F of each chunk on every virtual stage. */
static void find_microbatches(const cf_schedule *schedule, int32_t *chunks) {
    int64_t last = schedule->shape.n_stages * schedule->shape.n_virtual - 1, i, m = 0;
    int64_t row = cf_placement_stage(schedule->shape.placement, schedule->shape.n_stages, last);

    for (i = schedule->first[row]; i < schedule->first[row + 1]; i++)
        if (schedule->actions[i].pass == CF_F && schedule->actions[i].stage == last)
            chunks[m++] = schedule->actions[i].chunk;
}

cf_result schedule_csv_microbatches(const cf_plan *plan, const cf_schedule *schedule, int32_t *chunks,
                                    cf_error *error) {
    TRY(cf_schedule_validate(plan, schedule, NULL, NULL, error));
    if (!chunks) return cf_fail_null(error, "chunks");
    find_microbatches(schedule, chunks);
    return CF_OK;
}

cf_result schedule_csv_write_microbatches(const cf_plan *plan, const cf_schedule *schedule, cf_write_fn write,
                                          void *user, cf_error *error) {
    cf_allocator allocator;
    text_out to;
    void *chunks;
    int64_t m;

    TRY(cf_schedule_validate(plan, schedule, NULL, NULL, error));
    TRY(cf_allocator_resolve(NULL, &allocator, error));
    TRY(text_out_begin(&to, write, user, error));
    TRY(cf_allocate(&allocator, (size_t)plan->chunks_per_rank * sizeof(int32_t), &chunks, error));
    find_microbatches(schedule, (int32_t *)chunks);
    text_out_put(&to, "microbatch,chunk\r\n");
    for (m = 0; m < plan->chunks_per_rank && to.code == 0; m++)
        text_out_put(&to, "%lld,%d\r\n", (long long)m, (int)((const int32_t *)chunks)[m]);
    allocator.release(chunks, allocator.user);
    return text_out_end(&to, error);
}

/* Reorders the chunks of a rank. chunks: the new order. old, slices: space for the rank's chunks and the plan's slices
   in their present order. */
static void reorder_chunks(cf_plan *plan, int64_t rank, const int32_t *chunks, cf_chunk *old, cf_slice *slices) {
    int64_t first = rank * plan->chunks_per_rank, m, at, i;

    if (plan->chunks_per_rank == 0) return;
    memcpy(old, plan->chunks + first, (size_t)plan->chunks_per_rank * sizeof *old);
    if (plan->n_slices > 0) memcpy(slices, plan->slices, (size_t)plan->n_slices * sizeof *slices);
    at = old[0].first_slice;
    for (m = 0; m < plan->chunks_per_rank; m++) {
        cf_chunk *chunk = &plan->chunks[first + m];
        *chunk = old[chunks[m] - first];
        if (chunk->n_slices > 0)
            memcpy(plan->slices + at, slices + chunk->first_slice, (size_t)chunk->n_slices * sizeof *slices);
        for (i = at; i < at + chunk->n_slices; i++)
            if (plan->slices[i].up >= 0) plan->slices[i].up += (int32_t)(at - chunk->first_slice);
        chunk->first_slice = at;
        at += chunk->n_slices;
    }
}

/* Finds the microbatch of each chunk, counted within the rank, from the chunk of each microbatch. */
static void invert(const int32_t *chunks, int64_t first, int64_t n, int32_t *microbatch_of) {
    int64_t m;
    for (m = 0; m < n; m++) microbatch_of[chunks[m] - first] = (int32_t)m;
}

static cf_result check_no_groups(const cf_plan *plan, int64_t rank, const char *why, cf_error *error) {
    int64_t i;

    for (i = rank * plan->chunks_per_rank; i < (rank + 1) * plan->chunks_per_rank; i++)
        if (plan->chunks[i].chain >= 0) return cf_refuse(error, CF_ERROR_ARGUMENT, "chunks", i, why);
    return CF_OK;
}

cf_result schedule_csv_renumber(cf_plan *plan, cf_schedule *schedule, const cf_allocator *allocator, cf_error *error) {
    cf_allocator used;
    size_t n, bytes;
    cf_slice *slices;
    cf_chunk *old;
    int32_t *chunks;
    void *memory;
    int64_t i, first;

    TRY(cf_schedule_validate(plan, schedule, NULL, allocator, error));
    TRY(check_no_groups(plan, schedule->shape.rank, "is a dependent chunk, which stays with its chain", error));
    TRY(cf_allocator_resolve(allocator, &used, error));
    n = (size_t)plan->chunks_per_rank;
    bytes = (size_t)plan->n_slices * sizeof *slices + n * sizeof *old + 2 * n * sizeof *chunks;
    TRY(cf_allocate(&used, bytes, &memory, error));
    slices = (cf_slice *)memory;
    old = (cf_chunk *)(slices + plan->n_slices);
    chunks = (int32_t *)(old + n);
    first = schedule->shape.rank * plan->chunks_per_rank;
    find_microbatches(schedule, chunks);
    invert(chunks, first, plan->chunks_per_rank, chunks + n);
    reorder_chunks(plan, schedule->shape.rank, chunks, old, slices);
    for (i = 0; i < schedule->n_actions; i++)
        schedule->actions[i].chunk = (int32_t)first + (chunks + n)[schedule->actions[i].chunk - first];
    used.release(memory, used.user);
    return CF_OK;
}

/* ----------------------------------------------------------------------------------------------------------------
   Writing
   ---------------------------------------------------------------------------------------------------------------- */

static int with_transfers(const schedule_csv_desc *desc) { return desc->format == SCHEDULE_CSV_COMPUTE_COMMS; }

static int is_left_out(const cf_action *a, const schedule_csv_desc *desc) {
    return is_transfer(a) && !with_transfers(desc);
}

/* Refuses schedules that PyTorch would refuse, run wrongly, or run without a tensor that it needs. */
static cf_result check_runnable(const cf_plan *plan, const cf_schedule *schedule, cf_error *error) {
    int64_t i;

    TRY(check_no_groups(plan, schedule->shape.rank,
                        "is part of a split sequence, whose keys and values PyTorch's files do not hand on", error));
    for (i = 0; i < schedule->n_actions; i++)
        if (schedule->actions[i].pass == CF_R) /* transfers for replays come after a replay */
            return cf_refuse(error, CF_ERROR_ARGUMENT, "actions.pass", i,
                             "is a replay, which PyTorch's files do not have");
    return CF_OK;
}

static cf_result check_extra(const cf_plan *plan, const cf_schedule *schedule, const schedule_csv_extra *extra,
                             const schedule_csv_extra *previous) {
    int64_t first = schedule->shape.rank * plan->chunks_per_rank;

    if (extra->kind < 0 || extra->kind >= SCHEDULE_CSV_EXTRA_COUNT) return CF_ERROR_ARGUMENT;
    if (extra->row < 0 || extra->row >= schedule->shape.n_stages || extra->stage < 0) return CF_ERROR_ARGUMENT;
    if (extra->before < schedule->first[extra->row] || extra->before > schedule->first[extra->row + 1])
        return CF_ERROR_ARGUMENT;
    if (previous && (extra->row < previous->row || extra->before < previous->before)) return CF_ERROR_ARGUMENT;
    if (!is_of_transfers(extra->kind)) return CF_OK;
    return extra->chunk >= first && extra->chunk < first + plan->chunks_per_rank ? CF_OK : CF_ERROR_ARGUMENT;
}

static cf_result check_extras(const cf_plan *plan, const cf_schedule *schedule, const schedule_csv_extras *extras,
                              cf_error *error) {
    int64_t i;

    for (i = 0; extras && i < extras->n; i++)
        if (check_extra(plan, schedule, &extras->items[i], i > 0 ? &extras->items[i - 1] : NULL) != CF_OK)
            return cf_refuse(error, CF_ERROR_ARGUMENT, "extras.items", i, "is none of this schedule");
    return CF_OK;
}

/* Refuses all faults before the first character is written. */
static cf_result check_writable(const cf_plan *plan, const cf_schedule *schedule, const schedule_csv_desc *desc,
                                cf_error *error) {
    TRY(cf_schedule_validate(plan, schedule, NULL, desc->allocator, error));
    TRY(check_choice("format", desc->format, SCHEDULE_CSV_FORMAT_COUNT, error));
    TRY(check_choice("torch", desc->torch, SCHEDULE_CSV_TORCH_COUNT, error));
    if (with_transfers(desc) && !schedule->lowered && schedule->shape.n_stages > 1 && !desc->extras)
        return cf_refuse(error, CF_ERROR_ARGUMENT, "format", -1,
                         "the schedule has no transfers to write; lower it first");
    TRY(check_extras(plan, schedule, desc->extras, error));
    return desc->extensions ? CF_OK : check_runnable(plan, schedule, error);
}

typedef struct writer {
    text_out to;
    const cf_plan *plan;
    const cf_schedule *schedule;
    const schedule_csv_desc *desc;
    int32_t *microbatch_of; /* of the rank's chunks */
    int32_t *done;          /* number of backwards so far of each virtual stage */
    int64_t next_extra;
    const char *comma;      /* written before the next cell of the row: "" or "," */
} writer;

/* A cell; chunk -1: without a microbatch. */
static void put_cell(writer *w, int32_t stage, const char *word, int64_t chunk) {
    text_out_put(&w->to, "%s%d%s", w->comma, (int)stage, word);
    if (chunk >= 0)
        text_out_put(&w->to, "%d", (int)w->microbatch_of[chunk - w->schedule->shape.rank * w->plan->chunks_per_rank]);
    w->comma = ",";
}

/* Writes the extras just before an action, or at a row's end. */
static void put_extras(writer *w, int64_t row, int64_t before) {
    const schedule_csv_extras *extras = w->desc->extras;

    for (; extras && w->next_extra < extras->n; w->next_extra++) {
        const schedule_csv_extra *extra = &extras->items[w->next_extra];
        if (extra->row != row || extra->before != before) return;
        if (extra->kind == SCHEDULE_CSV_EMPTY) {
            if (with_transfers(w->desc)) continue;
            text_out_put(&w->to, "%s", w->comma);
            w->comma = ",";
        } else if (!is_of_transfers(extra->kind)) {
            put_cell(w, extra->stage, extra_names[extra->kind], -1);
        } else if (with_transfers(w->desc)) {
            put_cell(w, extra->stage, extra_names[extra->kind], extra->chunk);
        }
    }
}

static int adds_for_torch(const writer *w, schedule_csv_torch since) {
    return with_transfers(w->desc) && !w->desc->extras && w->desc->torch >= since;
}

static int sends_forwards(const cf_schedule *s, int64_t v) {
    return v + 1 < s->shape.n_stages * s->shape.n_virtual &&
           cf_placement_stage(s->shape.placement, s->shape.n_stages, v + 1) !=
               cf_placement_stage(s->shape.placement, s->shape.n_stages, v);
}

/* Writes the cells that PyTorch adds after an action when it lowers schedules itself. A wait for a send comes where the
   gradient of the same tensor has arrived: the peer has received the tensor by then, so the wait takes no time.
   Gradients are reduced after a stage's last backward, and after the send of its gradient. */
static void put_torch(writer *w, const cf_action *a, const cf_action *end) {
    int is_last, sends_next;

    if (adds_for_torch(w, SCHEDULE_CSV_TORCH_2_15) && (a->pass == CF_B || a->pass == CF_I) &&
        sends_forwards(w->schedule, a->stage))
        put_cell(w, a->stage, extra_names[SCHEDULE_CSV_WAIT_SEND_F], a->chunk);
    if (a->pass == CF_B || a->pass == CF_W) w->done[a->stage]++;
    is_last = w->done[a->stage] == w->plan->chunks_per_rank &&
              (a->pass == CF_B || a->pass == CF_W || a->pass == CF_SEND_B);
    sends_next = a + 1 < end && a[1].pass == CF_SEND_B && a[1].stage == a->stage;
    if (!adds_for_torch(w, SCHEDULE_CSV_TORCH_2_14) || !is_last || sends_next) return;
    w->done[a->stage]++; /* once */
    put_cell(w, a->stage, extra_names[SCHEDULE_CSV_REDUCE_GRAD], -1);
    if (adds_for_torch(w, SCHEDULE_CSV_TORCH_2_15))
        put_cell(w, a->stage, extra_names[SCHEDULE_CSV_WAIT_REDUCE_GRAD], -1);
}

static void write_row(writer *w, int64_t row) {
    const cf_schedule *schedule = w->schedule;
    const cf_action *begin = schedule->actions + schedule->first[row], *a;
    const cf_action *end = schedule->actions + schedule->first[row + 1];

    w->comma = "";
    for (a = begin; a < end && w->to.code == 0; a++) {
        put_extras(w, row, a - schedule->actions);
        if (is_left_out(a, w->desc)) continue;
        put_cell(w, a->stage, cf_pass_name((cf_pass)a->pass), a->chunk);
        put_torch(w, a, end);
    }
    put_extras(w, row, schedule->first[row + 1]);
    for (a = begin; a < end && adds_for_torch(w, SCHEDULE_CSV_TORCH_2_15); a++)
        if (a->pass == CF_SEND_B) put_cell(w, a->stage, extra_names[SCHEDULE_CSV_WAIT_SEND_B], a->chunk);
    text_out_put(&w->to, "\r\n");
}

/* Writes the rows. memory: space for the chunk of each microbatch, the microbatch of each chunk, and the count of each
   virtual stage. */
static void write_rows(writer *w, int32_t *memory) {
    int64_t chunks_per_rank = w->plan->chunks_per_rank, n_all =
        w->schedule->shape.n_stages * w->schedule->shape.n_virtual, row;

    find_microbatches(w->schedule, memory);
    w->microbatch_of = memory + chunks_per_rank;
    invert(memory, w->schedule->shape.rank * chunks_per_rank, chunks_per_rank, w->microbatch_of);
    w->done = (int32_t *)memset(memory + 2 * chunks_per_rank, 0, (size_t)n_all * sizeof(int32_t));
    for (row = 0; row < w->schedule->shape.n_stages && w->to.code == 0; row++) write_row(w, row);
}

cf_result schedule_csv_write(const cf_plan *plan, const cf_schedule *schedule, const schedule_csv_desc *desc,
                             cf_write_fn write, void *user, cf_error *error) {
    static const schedule_csv_desc defaults;
    cf_allocator allocator;
    writer w;
    void *memory;
    int64_t n_rows;

    memset(&w, 0, sizeof w);
    w.plan = plan;
    w.schedule = schedule;
    w.desc = desc ? desc : &defaults;
    TRY(check_writable(plan, schedule, w.desc, error));
    TRY(cf_allocator_resolve(w.desc->allocator, &allocator, error));
    TRY(text_out_begin(&w.to, write, user, error));
    n_rows = 2 * plan->chunks_per_rank + schedule->shape.n_stages * schedule->shape.n_virtual;
    TRY(cf_allocate(&allocator, (size_t)n_rows * sizeof(int32_t), &memory, error));
    write_rows(&w, (int32_t *)memory);
    allocator.release(memory, allocator.user);
    return text_out_end(&w.to, error);
}

/* ----------------------------------------------------------------------------------------------------------------
   Cells
   ---------------------------------------------------------------------------------------------------------------- */

typedef struct cell {
    const char *text; /* without the blanks around it */
    size_t n;
    int64_t line, column; /* from 1 */
} cell;

/* The reader. It goes through the text twice: first to count, then to fill in the schedule. */
typedef struct reader {
    const char *text;
    size_t bytes;
    schedule_csv_desc desc;
    const cf_plan *plan;
    cf_error *error;
    size_t at, line_begin; /* beginning of the next cell, and of the last cell's line */
    char separator;        /* the character after the last cell; 0: at the beginning or end of the text */
    cell cell;             /* the last cell; its line is the number of rows up to it */
    cell empty;            /* the first empty cell; line 0: none */
    int64_t n_extras;
} reader;

static cf_result bad_cell(const reader *r, const cell *c, const char *why) {
    char excerpt[25];
    size_t i;

    for (i = 0; i < c->n && i + 1 < sizeof excerpt; i++)
        excerpt[i] = (char)(c->text[i] >= ' ' && c->text[i] <= '~' ? c->text[i] : '?');
    excerpt[i] = 0;
    (void)cf_refuse(r->error, CF_ERROR_TEXT, "csv", c->line, why);
    if (!r->error) return CF_ERROR_TEXT;
    r->error->got = c->column;
    (void)snprintf(r->error->text, sizeof r->error->text, "csv line %lld, column %lld: %s: \"%s\"",
                   (long long)c->line, (long long)c->column, why, excerpt);
    return CF_ERROR_TEXT;
}

static void rewind_text(reader *r) {
    r->at = r->line_begin = 0;
    r->separator = 0;
    memset(&r->cell, 0, sizeof r->cell);
    r->cell.line = r->bytes > 0;
}

static int is_blank(char c) { return c == ' ' || c == '\t'; }

/* Reads the next cell, which may be empty. Returns 0 at the end of the text: a cell follows the last comma, but none
   follows the last line end. A line without characters has no cells, rather than an empty one; *bare is then 1. */
static int next_cell(reader *r, int *bare) {
    size_t begin = r->at, end = begin;

    if (begin == r->bytes && r->separator != ',') return 0;
    if (r->separator == '\n') {
        r->line_begin = begin;
        r->cell.line++;
    }
    while (end < r->bytes && r->text[end] != ',' && r->text[end] != '\n') end++;
    r->separator = end < r->bytes ? r->text[end] : 0;
    r->at = end < r->bytes ? end + 1 : end;
    if (r->separator == '\n' && end > begin && r->text[end - 1] == '\r') end--;
    *bare = r->separator == '\n' && end == r->line_begin;
    while (begin < end && is_blank(r->text[begin])) begin++;
    while (end > begin && is_blank(r->text[end - 1])) end--;
    r->cell.text = r->text + begin;
    r->cell.n = end - begin;
    r->cell.column = (int64_t)(begin - r->line_begin) + 1;
    return 1;
}

/* Reads a number without sign and leading zeros that fits in 31 bits. Returns its number of characters; 0: none. */
static size_t read_number(const char *text, size_t bytes, int32_t *value) {
    size_t n = 0;
    int64_t sum = 0;

    while (n < bytes && text[n] >= '0' && text[n] <= '9') {
        sum = sum * 10 + (text[n++] - '0');
        if (sum > INT32_MAX) return 0;
    }
    *value = (int32_t)sum;
    return n > 1 && text[0] == '0' ? 0 : n;
}

static int is_word(const char *text, size_t n, const char *word) {
    return strlen(word) == n && memcmp(text, word, n) == 0;
}

/* Returns the word of a pass or, with codes after those of passes, of an extra: the possible contents of a cell. */
static const char *word_of(int code) {
    return code < CF_PASS_COUNT ? cf_pass_name((cf_pass)code) : extra_names[code - CF_PASS_COUNT];
}

static int is_extra(const cf_action *a) { return a->pass >= CF_PASS_COUNT; }

static int needs_transfers(const cf_action *a) {
    return is_extra(a) ? is_of_transfers(a->pass - CF_PASS_COUNT) : is_transfer(a);
}

/* Returns whether a pass is read as the extra of the same name. */
static int is_apart(const reader *r, int code) { return r->desc.buffered && code >= CF_SEND_F && code <= CF_RECV_B; }

/* Finds a word among those that this file may hold. */
static cf_result read_word(const reader *r, const char *text, size_t n, uint8_t *out) {
    const int end = CF_PASS_COUNT + SCHEDULE_CSV_EXTRA_COUNT;
    int code = 0;

    while (code < end && (n == 0 || !is_word(text, n, word_of(code)) || is_apart(r, code))) code++;
    if (r->desc.legacy && code == CF_B) code = CF_I;
    else if (r->desc.legacy && is_word(text, n, "BW")) code = CF_B;
    *out = (uint8_t)code;
    if (code < end) return CF_OK;
    if (is_word(text, n, "BW")) return bad_cell(r, &r->cell, "BW stands in older files; read them with `legacy`");
    return bad_cell(r, &r->cell, "there is no such pass");
}

static cf_result bad_start(const reader *r) {
    static const char overlap[] = ")OVERLAP_F_B";
    const cell *c = &r->cell;
    size_t n = sizeof overlap - 1;

    if (c->n > n && c->text[0] == '(' && memcmp(c->text + c->n - n, overlap, n) == 0)
        return bad_cell(r, c, "OVERLAP_F_B, two passes that run as one, is no pass here");
    return bad_cell(r, c, "an action starts with the number of its virtual stage");
}

/* Reads the cell as an action; its pass may be an extra. */
static cf_result read_action(const reader *r, cf_action *action) {
    const cell *c = &r->cell;
    size_t word, end, used;

    word = read_number(c->text, c->n, &action->stage);
    if (word == 0) return bad_start(r);
    for (end = word; end < c->n && ((c->text[end] >= 'A' && c->text[end] <= 'Z') || c->text[end] == '_');) end++;
    TRY(read_word(r, c->text + word, end - word, &action->pass));
    if (is_extra(action) && !needs_transfers(action))
        return end == c->n ? CF_OK : bad_cell(r, c, "this action is of no microbatch and ends with its name");
    used = read_number(c->text + end, c->n - end, &action->chunk);
    if (used == 0 || end + used != c->n) return bad_cell(r, c, "an action ends with the number of its microbatch");
    if (action->chunk >= r->plan->chunks_per_rank) return bad_cell(r, c, "the rank has no chunk for this microbatch");
    action->chunk = r->desc.chunks ? r->desc.chunks[action->chunk]
                                   : (int32_t)(r->desc.rank * r->plan->chunks_per_rank) + action->chunk;
    return CF_OK;
}

/* Reads the next cell as an action, an empty one as an extra. *more: 0 at the end of the text. */
static cf_result next_action(reader *r, cf_action *action, int *more) {
    int bare;

    memset(action, 0, sizeof *action);
    while ((*more = next_cell(r, &bare)) != 0) {
        if (r->cell.n > 0) return read_action(r, action);
        action->pass = CF_PASS_COUNT + SCHEDULE_CSV_EMPTY;
        if (!bare) return CF_OK;
    }
    return CF_OK;
}

/* ----------------------------------------------------------------------------------------------------------------
   Reading
   ---------------------------------------------------------------------------------------------------------------- */

/* Refuses bad arguments without reading the text. It asks the library for a size only so that a plan, rank, kind or
   replay that the library does not know is refused in the library's words. */
static cf_result check_arguments(const reader *r, const char *text) {
    cf_schedule_desc order;
    size_t bytes;
    int64_t m, first;

    if (!text && r->bytes > 0) return cf_fail_null(r->error, "text");
    TRY(check_choice("format", r->desc.format, SCHEDULE_CSV_FORMAT_COUNT, r->error));
    memset(&order, 0, sizeof order);
    order.kind = r->desc.kind;
    order.shape.replay = r->desc.replay;
    if (order.shape.replay == CF_REPLAY_PIPELINE && (unsigned)order.kind < CF_SCHEDULE_COUNT)
        order.kind = CF_SCHEDULE_PAPER; /* a list of any kind may use that replay */
    order.shape.rank = r->desc.rank;
    TRY(cf_schedule_size(r->plan, &order, &bytes, r->error));
    first = r->desc.rank * r->plan->chunks_per_rank;
    for (m = 0; r->desc.chunks && m < r->plan->chunks_per_rank; m++)
        if (r->desc.chunks[m] < first || r->desc.chunks[m] >= first + r->plan->chunks_per_rank)
            return cf_refuse(r->error, CF_ERROR_ARGUMENT, "chunks", m, "is no chunk of the rank");
    return r->desc.k >= 0 ? CF_OK : cf_fail(r->error, CF_ERROR_ARGUMENT, "k", -1, 0, r->desc.k, "is too small");
}

/* Counts one cell. */
static cf_result count_action(reader *r, const cf_action *action, cf_schedule *header) {
    int is_empty = action->pass == CF_PASS_COUNT + SCHEDULE_CSV_EMPTY;
    int64_t *count = is_extra(action) ? &r->n_extras : &header->n_actions;

    if (needs_transfers(action) && r->desc.format == SCHEDULE_CSV_COMPUTE_ONLY)
        return bad_cell(r, &r->cell, "there is a transfer in a file that is said to hold passes only");
    if (*count == CF_MAX_ACTIONS)
        return cf_fail(r->error, CF_ERROR_LIMIT, "n_actions", -1, CF_MAX_ACTIONS, *count + 1, "is too large");
    ++*count;
    if (needs_transfers(action)) header->lowered = 1;
    if (is_empty && r->empty.line == 0) r->empty = r->cell;
    if (!is_empty && action->stage >= header->shape.n_virtual) header->shape.n_virtual = (int64_t)action->stage + 1;
    return CF_OK;
}

/* First reading: every cell must be an action, and all must belong to one dialect. Fills in rows, actions, virtual
   stages (in total for now) and whether there are transfers. */
static cf_result count_actions(reader *r, cf_schedule *header) {
    cf_action action;
    int more;

    rewind_text(r);
    for (;;) {
        TRY(next_action(r, &action, &more));
        if (!more) break;
        TRY(count_action(r, &action, header));
    }
    header->shape.n_stages = r->cell.line;
    if (r->desc.format == SCHEDULE_CSV_COMPUTE_COMMS) header->lowered = 1;
    if (header->shape.n_stages == 0) {
        const cell start = {"", 0, 1, 1};
        return bad_cell(r, &start, "there are no rows");
    }
    if (r->empty.line > 0 && header->lowered)
        return bad_cell(r, &r->empty, "a file with transfers has no empty cells");
    if (r->desc.buffered) header->lowered = 0;
    return CF_OK;
}

/* Derives the header from the counts. A text with fewer than two actions per chunk and stage (for forwards alone, one)
   is refused here, before memory is allocated. */
static cf_result finish_header(const reader *r, cf_schedule *header) {
    int64_t all = header->n_actions > 0 ? header->shape.n_virtual : header->shape.n_stages, chunks_per_rank =
        r->plan->chunks_per_rank;
    int64_t passes = r->desc.forward_only ? 1 : 2;
    int64_t needed = chunks_per_rank > INT64_MAX / (2 * all) ? INT64_MAX : passes * all * chunks_per_rank;

    header->kind = r->desc.kind;
    header->shape.replay = r->desc.replay == CF_REPLAY_DEFAULT ? CF_REPLAY_PIPELINE : r->desc.replay;
    header->shape.n_virtual = all / header->shape.n_stages;
    header->shape.k = r->desc.k > 0 ? r->desc.k : 1;
    header->shape.rank = r->desc.rank;
    header->n_chunks = r->plan->n_chunks;
    header->shape.forward_only = passes == 1;
    if (all % header->shape.n_stages != 0)
        return cf_fail(r->error, CF_ERROR_SCHEDULE, "n_virtual", -1, header->shape.n_stages, all,
                       "the number of virtual stages is no multiple of the number of rows");
    if (header->n_actions < needed)
        return cf_fail(r->error, CF_ERROR_SCHEDULE, "n_actions", -1, needed, header->n_actions,
                       passes == 2 ? "every chunk needs two passes on every virtual stage"
                                   : "every chunk needs a pass on every virtual stage");
    return CF_OK;
}

static schedule_csv_extra extra_of(const cf_action *a, int64_t before, int64_t row) {
    schedule_csv_extra extra;

    extra.before = before;
    extra.row = (int32_t)row;
    extra.stage = a->stage;
    extra.chunk = a->chunk;
    extra.kind = a->pass - CF_PASS_COUNT;
    return extra;
}

/* Second reading: fills in the actions from cells that the first reading accepted. Rows that fit both loops and a V are
   read as loops. extras: may be NULL. */
static cf_result fill_actions(reader *r, cf_schedule *schedule, schedule_csv_extra *extras) {
    int64_t n = 0, cells, stage, n_stages = schedule->shape.n_stages;
    int more, loops = 1, turns = 1;
    cf_action action;

    rewind_text(r);
    for (cells = schedule->n_actions + r->n_extras; cells > 0; cells--) {
        TRY(next_action(r, &action, &more));
        if (action.pass != CF_PASS_COUNT + SCHEDULE_CSV_EMPTY) {
            loops &= cf_placement_stage(CF_PLACEMENT_LOOP, n_stages, action.stage) == r->cell.line - 1;
            turns &= cf_placement_stage(CF_PLACEMENT_V, n_stages, action.stage) == r->cell.line - 1;
        }
        if (!loops && !turns)
            return bad_cell(r, &r->cell, "this virtual stage lies on another row, in loops (v mod rows) as in a V");
        if (!is_extra(&action)) {
            schedule->actions[n++] = action;
            schedule->first[r->cell.line]++;
        } else if (extras) {
            *extras++ = extra_of(&action, n, r->cell.line - 1);
        }
    }
    for (stage = 0; stage < n_stages; stage++) schedule->first[stage + 1] += schedule->first[stage];
    schedule->shape.placement = loops ? CF_PLACEMENT_LOOP : CF_PLACEMENT_V;
    return CF_OK;
}

/* Sets `keep`: R keeps, and so does F unless there is an R or no backward at all. live: a zero for each chunk and
   virtual stage. */
static void find_keeps(const cf_plan *plan, cf_schedule *schedule, int32_t *live) {
    int64_t i, first = schedule->shape.rank * plan->chunks_per_rank;

    for (i = 0; i < schedule->n_actions; i++) {
        cf_action *a = &schedule->actions[i];
        a->keep = a->pass == CF_R;
        if (a->keep) live[a->stage * plan->chunks_per_rank + a->chunk - first] = 1;
    }
    for (i = 0; i < schedule->n_actions; i++) {
        cf_action *a = &schedule->actions[i];
        if (a->pass != CF_F || schedule->shape.forward_only) continue;
        a->keep = !live[a->stage * plan->chunks_per_rank + a->chunk - first];
    }
}

/* Finds K: the most chunks of a chain that are kept at the same time, counted at the chain's first chunk. live: as
   above. */
static void find_k(const cf_plan *plan, cf_schedule *schedule, int32_t *live) {
    int64_t i, first = schedule->shape.rank * plan->chunks_per_rank;

    for (i = 0; i < schedule->n_actions; i++) {
        const cf_action *a = &schedule->actions[i];
        int32_t *count = &live[a->stage * plan->chunks_per_rank + a->chunk - plan->chunks[a->chunk].index - first];
        *count += a->keep - (a->pass == CF_B || a->pass == CF_W);
        if (*count > schedule->shape.k) schedule->shape.k = *count;
    }
}

static cf_result find_keeps_and_k(const reader *r, cf_schedule *schedule) {
    const cf_allocator *allocator = &schedule->block.allocator;
    size_t bytes =
        (size_t)(schedule->shape.n_stages * schedule->shape.n_virtual * r->plan->chunks_per_rank) * sizeof(int32_t);
    void *live;

    TRY(cf_allocate(allocator, bytes, &live, r->error));
    find_keeps(r->plan, schedule, (int32_t *)memset(live, 0, bytes));
    if (r->desc.k == 0) find_k(r->plan, schedule, (int32_t *)memset(live, 0, bytes));
    allocator->release(live, allocator->user);
    return CF_OK;
}

void schedule_csv_extras_free(schedule_csv_extras *extras) {
    cf_allocator allocator;

    if (!extras) return;
    allocator = extras->block.allocator;
    allocator.release(extras, allocator.user);
}

/* Room for n extras. */
static cf_result extras_new(int64_t n, const cf_allocator *given, schedule_csv_extras **out, cf_error *error) {
    cf_allocator allocator;
    schedule_csv_extras *extras;
    size_t bytes;
    void *memory;

    TRY(cf_allocator_resolve(given, &allocator, error));
    if ((uint64_t)n > (SIZE_MAX - sizeof *extras) / sizeof *extras->items)
        return cf_refuse(error, CF_ERROR_OVERFLOW, "bytes", -1, "does not fit in memory");
    bytes = sizeof *extras + (size_t)n * sizeof *extras->items;
    TRY(cf_allocate(&allocator, bytes, &memory, error));
    extras = (schedule_csv_extras *)memory;
    extras->n = n;
    extras->items = (schedule_csv_extra *)(extras + 1);
    extras->block.allocator = allocator;
    extras->block.bytes = bytes;
    *out = extras;
    return CF_OK;
}

/* Fills in and checks the schedule and the extras, whose memory is allocated by now. */
static cf_result read_schedule(reader *r, cf_schedule *schedule, schedule_csv_extras *extras) {
    TRY(fill_actions(r, schedule, extras ? extras->items : NULL));
    TRY(find_keeps_and_k(r, schedule));
    return cf_schedule_validate(r->plan, schedule, NULL, r->desc.allocator, r->error);
}

cf_result schedule_csv_read(const char *text, size_t bytes, const cf_plan *plan, const schedule_csv_desc *desc,
                            cf_schedule **out, schedule_csv_extras **extras, cf_error *error) {
    reader r;
    cf_schedule header, *schedule = NULL;
    schedule_csv_extras *made = NULL;
    cf_result result;

    memset(&r, 0, sizeof r);
    memset(&header, 0, sizeof header);
    if (desc) r.desc = *desc;
    r.text = text ? text : "";
    r.bytes = bytes;
    r.plan = plan;
    r.error = error;
    TRY(check_arguments(&r, text));
    TRY(count_actions(&r, &header));
    if (!out) return cf_fail_null(error, "out");
    TRY(finish_header(&r, &header));
    TRY(schedule_new(&header, r.desc.allocator, &schedule, error));
    result = extras ? extras_new(r.n_extras, r.desc.allocator, &made, error) : CF_OK;
    if (result == CF_OK) result = read_schedule(&r, schedule, made);
    if (result == CF_OK) {
        *out = schedule;
        if (extras) *extras = made;
        return CF_OK;
    }
    cf_schedule_free(schedule);
    schedule_csv_extras_free(made);
    return result;
}

/* ----------------------------------------------------------------------------------------------------------------
   Reading microbatches
   ---------------------------------------------------------------------------------------------------------------- */

/* Reads the two cells of a line as numbers. */
static cf_result read_pair(reader *r, int32_t *microbatch, int32_t *chunk) {
    int32_t *const numbers[] = {microbatch, chunk};
    int i, bare;

    for (i = 0; i < 2; i++) {
        if (!next_cell(r, &bare) || r->cell.n == 0 || read_number(r->cell.text, r->cell.n, numbers[i]) != r->cell.n)
            return bad_cell(r, &r->cell, "a line is the number of a microbatch and of its chunk");
        if ((r->separator == ',') != (i == 0)) return bad_cell(r, &r->cell, "a line has two numbers");
    }
    return CF_OK;
}

static cf_result read_header(reader *r) {
    int bare, is_header;

    is_header = next_cell(r, &bare) && is_word(r->cell.text, r->cell.n, "microbatch") && r->separator == ',';
    is_header = is_header && next_cell(r, &bare) && is_word(r->cell.text, r->cell.n, "chunk") && r->separator != ',';
    return is_header ? CF_OK : bad_cell(r, &r->cell, "the first line is microbatch,chunk");
}

/* Reads the microbatches. chunk_of: filled in; taken: zeros, a byte for each chunk of the rank. */
static cf_result read_microbatches(reader *r, int32_t *chunk_of, unsigned char *taken) {
    int64_t first = r->desc.rank * r->plan->chunks_per_rank, m;
    int32_t microbatch, chunk;
    int bare;

    TRY(read_header(r));
    for (m = 0; m < r->plan->chunks_per_rank; m++) {
        TRY(read_pair(r, &microbatch, &chunk));
        if (microbatch != m) return bad_cell(r, &r->cell, "microbatches are counted up from 0");
        if (chunk < first || chunk >= first + r->plan->chunks_per_rank)
            return bad_cell(r, &r->cell, "this is no chunk of the rank");
        if (taken[chunk - first]++) return bad_cell(r, &r->cell, "this chunk has a microbatch already");
        chunk_of[m] = chunk;
    }
    return next_cell(r, &bare) ? bad_cell(r, &r->cell, "the rank has no more chunks") : CF_OK;
}

cf_result schedule_csv_read_microbatches(const char *text, size_t bytes, const cf_plan *plan, int64_t rank,
                                         int32_t *chunks, cf_error *error) {
    cf_allocator allocator;
    cf_result result;
    reader r;
    void *memory;
    size_t n;

    memset(&r, 0, sizeof r);
    r.text = text ? text : "";
    r.bytes = bytes;
    r.plan = plan;
    r.error = error;
    r.desc.rank = rank;
    TRY(check_arguments(&r, text));
    if (!chunks) return cf_fail_null(error, "chunks");
    n = (size_t)plan->chunks_per_rank;
    TRY(cf_allocator_resolve(NULL, &allocator, error));
    TRY(cf_allocate(&allocator, n * (sizeof(int32_t) + 1), &memory, error));
    memset(memory, 0, n * (sizeof(int32_t) + 1));
    rewind_text(&r);
    result = read_microbatches(&r, (int32_t *)memory, (unsigned char *)memory + n * sizeof(int32_t));
    if (result == CF_OK && n > 0) memcpy(chunks, memory, n * sizeof(int32_t));
    allocator.release(memory, allocator.user);
    return result;
}
