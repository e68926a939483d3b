/* schedule_csv.c - schedules as CSV, out and in. */

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

static cf_result check_format(schedule_csv_format format, cf_error *error) {
    int64_t got = (int64_t)format, last = SCHEDULE_CSV_FORMAT_COUNT - 1;

    if (got >= 0 && got <= last) return CF_OK;
    return cf_fail(error, CF_ERROR_ARGUMENT, "format", -1, got < 0 ? 0 : last, got, "there is no such choice");
}

static int is_transfer(const cf_action *a) { return a->pass >= CF_COMPUTE_PASS_COUNT; }

/* ----------------------------------------------------------------------------------------------------------------
   Writing
   ---------------------------------------------------------------------------------------------------------------- */

static int is_extension(const cf_action *a) {
    return a->pass == CF_R || a->pass == CF_SEND_R || a->pass == CF_RECV_R || a->pass == CF_OFFLOAD ||
           a->pass == CF_PREFETCH;
}

static int is_left_out(const cf_action *a, const schedule_csv_desc *desc) {
    return is_transfer(a) && desc->format == SCHEDULE_CSV_COMPUTE_ONLY;
}

/* Everything that can be refused, before the first character is written. */
static cf_result check_writable(const cf_plan *plan, const cf_schedule *schedule, const schedule_csv_desc *desc,
                                cf_error *error) {
    int64_t i;

    TRY(cf_schedule_validate(plan, schedule, NULL, desc->allocator, error));
    TRY(check_format(desc->format, error));
    if (desc->format == SCHEDULE_CSV_COMPUTE_COMMS && !schedule->lowered && schedule->n_stages > 1)
        return cf_refuse(error, CF_ERROR_ARGUMENT, "format", -1,
                         "the schedule has no transfers to write; lower it first");
    for (i = 0; i < schedule->n_actions && !desc->extensions; i++)
        if (is_extension(&schedule->actions[i]) && !is_left_out(&schedule->actions[i], desc))
            return cf_refuse(error, CF_ERROR_ARGUMENT, "extensions", i, "PyTorch's files do not have such a pass");
    return CF_OK;
}

static void write_row(text_out *to, const cf_plan *plan, const cf_schedule *schedule, int64_t stage,
                      const schedule_csv_desc *desc) {
    const char *comma = "";
    int64_t i;

    for (i = schedule->first[stage]; i < schedule->first[stage + 1] && to->code == 0; i++) {
        const cf_action *a = &schedule->actions[i];
        if (is_left_out(a, desc)) continue;
        text_out_put(to, "%s%d%s%lld", comma, (int)a->stage, cf_pass_name((cf_pass)a->pass),
                     (long long)(a->chunk - schedule->rank * plan->n_steps));
        comma = ",";
    }
    text_out_put(to, "\r\n");
}

cf_result schedule_csv_write(const cf_plan *plan, const cf_schedule *schedule, const schedule_csv_desc *desc,
                             cf_write_fn write, void *user, cf_error *error) {
    static const schedule_csv_desc defaults;
    text_out to;
    int64_t stage;

    if (!desc) desc = &defaults;
    TRY(check_writable(plan, schedule, desc, error));
    TRY(text_out_begin(&to, write, user, error));
    for (stage = 0; stage < schedule->n_stages && to.code == 0; stage++) write_row(&to, plan, schedule, stage, desc);
    return text_out_end(&to, error);
}

/* ----------------------------------------------------------------------------------------------------------------
   Cells
   ---------------------------------------------------------------------------------------------------------------- */

typedef struct cell {
    const char *text; /* without the blanks around it */
    size_t n;
    int64_t line, column; /* from 1 */
} cell;

/* The reader goes through the text twice: once to count, once to fill in the schedule. */
typedef struct reader {
    const char *text;
    size_t bytes;
    schedule_csv_desc desc;
    const cf_plan *plan;
    cf_error *error;
    size_t at, line_begin; /* where the next cell and the line of the last one begin */
    char separator;        /* behind the cell last read; 0: the text begins or ends there */
    cell cell;             /* the one last read; its line is the number of rows up to it */
    cell empty;            /* the first empty one; line 0: there was none */
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

/* The next cell, which may be empty. Returns 0 at the end of the text: there is a cell behind the last comma, and none
   behind the last line end. A line without any character has no cells, not an empty one, which *bare says. */
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

/* A number without sign and leading zeros that fits in 31 bits. Returns its number of characters, 0: there is none. */
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

/* The pass of that name, as this file means it. */
static cf_result read_pass(const reader *r, const char *text, size_t n, uint8_t *out) {
    static const char *const foreign[] = {"UNSHARD", "RESHARD", "REDUCE_GRAD"};
    int pass = 0, i;

    while (pass < CF_PASS_COUNT && !is_word(text, n, cf_pass_name((cf_pass)pass))) pass++;
    if (r->desc.legacy && pass == CF_B) pass = CF_I;
    else if (r->desc.legacy && is_word(text, n, "BW")) pass = CF_B;
    *out = (uint8_t)pass;
    if (pass < CF_PASS_COUNT) return CF_OK;
    for (i = 0; i < 3; i++)
        if (is_word(text, n, foreign[i])) return bad_cell(r, &r->cell, "sharding is not scheduled here");
    if (is_word(text, n, "BW")) return bad_cell(r, &r->cell, "BW stands in older files; read them with `legacy`");
    return bad_cell(r, &r->cell, "there is no such pass");
}

/* The cell as an action; chunk counts within the rank. */
static cf_result read_action(const reader *r, cf_action *action) {
    const cell *c = &r->cell;
    size_t word, end, used;

    memset(action, 0, sizeof *action);
    word = read_number(c->text, c->n, &action->stage);
    if (word == 0) return bad_cell(r, c, "an action starts with the number of its virtual stage");
    for (end = word; end < c->n && ((c->text[end] >= 'A' && c->text[end] <= 'Z') || c->text[end] == '_');) end++;
    TRY(read_pass(r, c->text + word, end - word, &action->pass));
    used = read_number(c->text + end, c->n - end, &action->chunk);
    if (used == 0 || end + used != c->n) return bad_cell(r, c, "an action ends with the number of its chunk");
    if (action->chunk >= r->plan->n_steps) return bad_cell(r, c, "the rank has no such chunk");
    return CF_OK;
}

/* The next action of the text; *more: 0 at its end. */
static cf_result next_action(reader *r, cf_action *action, int *more) {
    int bare;

    while ((*more = next_cell(r, &bare)) != 0) {
        if (r->cell.n > 0) return read_action(r, action);
        if (!bare && r->empty.line == 0) r->empty = r->cell;
    }
    return CF_OK;
}

/* ----------------------------------------------------------------------------------------------------------------
   Reading
   ---------------------------------------------------------------------------------------------------------------- */

/* What can be refused without looking at the text. The size itself is not wanted: asking for it refuses a plan, a rank,
   a kind or a replay that the library could not schedule with, in the library's words. */
static cf_result check_arguments(const reader *r, const char *text) {
    cf_schedule_desc order;
    size_t bytes;

    if (!text && r->bytes > 0) return cf_fail_null(r->error, "text");
    TRY(check_format(r->desc.format, r->error));
    memset(&order, 0, sizeof order);
    order.kind = r->desc.kind;
    order.replay = r->desc.replay;
    order.rank = r->desc.rank;
    TRY(cf_schedule_size(r->plan, &order, &bytes, r->error));
    return r->desc.k >= 0 ? CF_OK : cf_fail(r->error, CF_ERROR_ARGUMENT, "k", -1, 0, r->desc.k, "is too small");
}

/* First time through: every cell must be an action, and the dialect must be one. Fills in rows, actions, virtual stages
   (all of them for now) and whether there are transfers. */
static cf_result count_actions(reader *r, cf_schedule *header) {
    const schedule_csv_format format = r->desc.format;
    cf_action action;
    int more;

    rewind_text(r);
    for (;;) {
        TRY(next_action(r, &action, &more));
        if (!more) break;
        if (is_transfer(&action) && format == SCHEDULE_CSV_COMPUTE_ONLY)
            return bad_cell(r, &r->cell, "there is a transfer in a file that is said to hold passes only");
        if (header->n_actions == CF_MAX_ACTIONS)
            return cf_fail(r->error, CF_ERROR_LIMIT, "n_actions", -1, CF_MAX_ACTIONS, header->n_actions + 1,
                           "is too large");
        if (is_transfer(&action)) header->lowered = 1;
        if (action.stage >= header->n_virtual) header->n_virtual = (int64_t)action.stage + 1;
        header->n_actions++;
    }
    header->n_stages = r->cell.line;
    if (format == SCHEDULE_CSV_COMPUTE_COMMS) header->lowered = 1;
    if (header->n_stages == 0) {
        const cell start = {"", 0, 1, 1};
        return bad_cell(r, &start, "there are no rows");
    }
    if (r->empty.line > 0 && header->lowered)
        return bad_cell(r, &r->empty, "a file with transfers has no empty cells");
    return CF_OK;
}

/* What follows from the counts. A text with fewer than two actions for each chunk and stage is refused here, before any
   memory is asked for. */
static cf_result finish_header(const reader *r, cf_schedule *header) {
    int64_t all = header->n_actions > 0 ? header->n_virtual : header->n_stages, n_steps = r->plan->n_steps;
    int64_t needed = n_steps > INT64_MAX / (2 * all) ? INT64_MAX : 2 * all * n_steps;

    header->kind = r->desc.kind;
    header->replay = r->desc.replay == CF_REPLAY_DEFAULT ? CF_REPLAY_PIPELINE : r->desc.replay;
    header->n_virtual = all / header->n_stages;
    header->k = r->desc.k > 0 ? r->desc.k : 1;
    header->rank = r->desc.rank;
    header->n_chunks = r->plan->n_chunks;
    if (all % header->n_stages != 0)
        return cf_fail(r->error, CF_ERROR_SCHEDULE, "n_virtual", -1, header->n_stages, all,
                       "the number of virtual stages is no multiple of the number of rows");
    if (header->n_actions < needed)
        return cf_fail(r->error, CF_ERROR_SCHEDULE, "n_actions", -1, needed, header->n_actions,
                       "every chunk needs two passes on every virtual stage");
    return CF_OK;
}

/* Second time: the actions, which could be read the first time, with chunks as the plan numbers them. Rows that loops
   and a V explain alike are loops. */
static cf_result fill_actions(reader *r, cf_schedule *schedule) {
    int64_t n, stage, n_stages = schedule->n_stages;
    int more, loops = 1, turns = 1;

    rewind_text(r);
    for (n = 0; n < schedule->n_actions; n++) {
        cf_action *action = &schedule->actions[n];
        TRY(next_action(r, action, &more));
        loops &= cf_placement_stage(CF_PLACEMENT_LOOP, n_stages, action->stage) == r->cell.line - 1;
        turns &= cf_placement_stage(CF_PLACEMENT_V, n_stages, action->stage) == r->cell.line - 1;
        if (!loops && !turns)
            return bad_cell(r, &r->cell, "this virtual stage lies on another row, in loops (v mod rows) as in a V");
        action->chunk += (int32_t)(schedule->rank * r->plan->n_steps);
        schedule->first[r->cell.line]++;
    }
    for (stage = 0; stage < n_stages; stage++) schedule->first[stage + 1] += schedule->first[stage];
    schedule->placement = loops ? CF_PLACEMENT_LOOP : CF_PLACEMENT_V;
    return CF_OK;
}

/* R keeps, and so does F unless there is an R. live: a zero for each chunk and virtual stage. */
static void find_keeps(const cf_plan *plan, cf_schedule *schedule, int32_t *live) {
    int64_t i, first = schedule->rank * plan->n_steps;

    for (i = 0; i < schedule->n_actions; i++) {
        cf_action *a = &schedule->actions[i];
        a->keep = a->pass == CF_R;
        if (a->keep) live[a->stage * plan->n_steps + a->chunk - first] = 1;
    }
    for (i = 0; i < schedule->n_actions; i++) {
        cf_action *a = &schedule->actions[i];
        if (a->pass == CF_F) a->keep = !live[a->stage * plan->n_steps + a->chunk - first];
    }
}

/* The most chunks of a group that are kept at once, counted at the group's first chunk. live: as above. */
static void find_k(const cf_plan *plan, cf_schedule *schedule, int32_t *live) {
    int64_t i, first = schedule->rank * plan->n_steps;

    for (i = 0; i < schedule->n_actions; i++) {
        const cf_action *a = &schedule->actions[i];
        int32_t *count = &live[a->stage * plan->n_steps + a->chunk - plan->chunks[a->chunk].index - first];
        *count += a->keep - (a->pass == CF_B || a->pass == CF_W);
        if (*count > schedule->k) schedule->k = *count;
    }
}

static cf_result find_keeps_and_k(const reader *r, cf_schedule *schedule) {
    const cf_allocator *allocator = &schedule->block.allocator;
    size_t bytes = (size_t)(schedule->n_stages * schedule->n_virtual * r->plan->n_steps) * sizeof(int32_t);
    void *live;

    TRY(cf_allocate(allocator, bytes, &live, r->error));
    find_keeps(r->plan, schedule, (int32_t *)memset(live, 0, bytes));
    if (r->desc.k == 0) find_k(r->plan, schedule, (int32_t *)memset(live, 0, bytes));
    allocator->release(live, allocator->user);
    return CF_OK;
}

cf_result schedule_csv_read(const char *text, size_t bytes, const cf_plan *plan, const schedule_csv_desc *desc,
                            cf_schedule **out, cf_error *error) {
    reader r;
    cf_schedule header, *schedule;
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
    result = fill_actions(&r, schedule);
    if (result == CF_OK) result = find_keeps_and_k(&r, schedule);
    if (result == CF_OK) result = cf_schedule_validate(plan, schedule, NULL, r.desc.allocator, error);
    if (result == CF_OK) *out = schedule;
    else cf_schedule_free(schedule);
    return result;
}
