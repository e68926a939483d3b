/* The command's readers of lists of lengths, of config.json, of JSON, and of plans and schedules in JSON. */

#include "fuzz.h"

#include "../reference/oracle.h"
#include "tools/command/config_json.h"
#include "tools/command/saved.h"

#include <stdlib.h>
#include <string.h>

/* ----------------------------------------------------------------------------------------------------------------
   Lists of lengths
   ---------------------------------------------------------------------------------------------------------------- */

enum { MOST_SEQUENCES = 500 };

/* Writes the list out, one entry a line, for reading it again. */
static fuzz_text list_text(const cli_list *list) {
    fuzz_text text = {NULL, 0, 0};
    size_t i;
    for (i = 0; i < list->n_entries; i++) {
        char line[64];
        int n = snprintf(line, sizeof line, "%lld %lld\n", (long long)list->entries[i].length,
                         (long long)list->entries[i].count);
        fuzz_write(line, (size_t)n, &text);
    }
    return text;
}

static void check_list(const cli_list *list) {
    int64_t *lengths = cli_list_lengths(list), sum = 0, k;
    size_t i;
    FUZZ_CHECK(lengths != NULL, "no memory");
    for (i = 0; i < list->n_entries; i++) {
        const cli_entry *e = &list->entries[i];
        FUZZ_CHECK(e->length >= 0 && e->length <= CF_MAX_LENGTH, "a length of %lld", (long long)e->length);
        FUZZ_CHECK(e->count >= 0 && e->line > 0, "%lld on line %lld", (long long)e->count, (long long)e->line);
        for (k = 0; k < e->count; k++) FUZZ_CHECK(lengths[sum + k] == e->length, "not the lengths of the entries");
        if (e->count > 0) FUZZ_CHECK(cli_list_line(list, sum) == e->line, "another line");
        sum += e->count;
    }
    FUZZ_CHECK(sum == list->n_sequences && sum <= MOST_SEQUENCES, "%lld sequences", (long long)sum);
    free(lengths);
}

static void check_same_list(const cli_list *list, cli_list *again) {
    size_t i;
    FUZZ_CHECK(again->n_entries == list->n_entries, "another number of entries");
    for (i = 0; i < list->n_entries; i++)
        FUZZ_CHECK(again->entries[i].length == list->entries[i].length &&
                       again->entries[i].count == list->entries[i].count, "another entry");
    cli_list_free(again);
}

static void run_lengths(const uint8_t *data, size_t size) {
    cli_list list, again;
    fuzz_text text;
    fuzz_file(data, size);
    if (!fuzz_exit(cli_list_read("list", MOST_SEQUENCES, &list))) return;
    FUZZ_CHECK(size <= CLI_MAX_LIST_BYTES, "%llu bytes were read", (unsigned long long)size);
    check_list(&list);
    text = list_text(&list);
    fuzz_file(text.text, text.bytes);
    if (fuzz_exit(cli_list_read("list", MOST_SEQUENCES, &again))) check_same_list(&list, &again);
    else FUZZ_CHECK(text.bytes > CLI_MAX_LIST_BYTES, "what was read cannot be read again");
    fuzz_text_free(&text);
    cli_list_free(&list);
}

const fuzz_target fuzz_lengths = {"lengths", run_lengths, 0};

/* ----------------------------------------------------------------------------------------------------------------
   config.json
   ---------------------------------------------------------------------------------------------------------------- */

static void run_config(const uint8_t *data, size_t size) {
    config_json config;
    cf_parameters parameters;
    cf_error error = fuzz_error();
    fuzz_file(data, size);
    memset(&config, 0xff, sizeof config);
    if (!fuzz_exit(config_json_read("config.json", &config))) return;
    FUZZ_CHECK(memchr(config.name, '\0', sizeof config.name) != NULL, "a name without an end");
    FUZZ_CHECK(fuzz_result(cf_model_validate(&config.model, &error), &error), "no sound model: %s", error.text);
    if (fuzz_result(cf_model_parameters(&config.model, &parameters, &error), &error))
        FUZZ_CHECK(parameters.total > 0, "%lld parameters", (long long)parameters.total);
}

const fuzz_target fuzz_config = {"config", run_config, 0};

/* ----------------------------------------------------------------------------------------------------------------
   JSON
   ---------------------------------------------------------------------------------------------------------------- */

const char *fuzz_json_fault(const char *text, size_t bytes); /* by the tests' own reader; NULL: it is JSON */

/* A copy with a zero byte behind it, as cli_file_read leaves a file. */
static char *copy_text(const uint8_t *data, size_t size) {
    char *text = (char *)malloc(size + 1);
    FUZZ_CHECK(text != NULL, "no memory");
    if (size > 0) memcpy(text, data, size);
    text[size] = '\0';
    return text;
}

static void check_node(const json_document *document, uint32_t node, size_t size) {
    const json_node *n = &document->nodes[node];
    char out[16];
    int64_t number;
    FUZZ_CHECK(n->begin <= n->end && n->end <= size, "node %u: bytes %u to %u", node, n->begin, n->end);
    FUZZ_CHECK(n->next > node && n->next <= document->n_nodes, "node %u: next is %u", node, n->next);
    if (n->kind == JSON_STRING) {
        json_copy_text(document, node, out, sizeof out);
        FUZZ_CHECK(memchr(out, '\0', sizeof out) != NULL, "a string without an end");
    }
    if (n->kind == JSON_ARRAY || n->kind == JSON_OBJECT)
        FUZZ_CHECK(json_count(document, node) <= (int64_t)(n->next - node - 1), "node %u holds too many", node);
    if (n->kind != JSON_NUMBER) return;
    fuzz_file("", 0);
    (void)fuzz_exit(json_read_int(document, node, "number", &number));
}

static void run_json(const uint8_t *data, size_t size) {
    char *text = copy_text(data, size);
    json_document document;
    uint32_t i;
    fuzz_file("", 0);
    if (fuzz_exit(json_parse("a.json", text, size, &document))) {
        FUZZ_CHECK(document.n_nodes > 0, "no nodes");
        if (fuzz_exit(json_check(&document))) {
            const char *fault = fuzz_json_fault(text, size);
            FUZZ_CHECK(fault == NULL, "the other reader says: %s", fault);
        }
        for (i = 0; i < document.n_nodes; i++) check_node(&document, i, size);
        json_free(&document);
    }
    free(text);
}

const fuzz_target fuzz_json = {"json", run_json, 0};

/* ----------------------------------------------------------------------------------------------------------------
   Plans and schedules in JSON
   ---------------------------------------------------------------------------------------------------------------- */

static void check_same_plan(const cf_plan *a, const cf_plan *b) {
    FUZZ_CHECK(a->n_chunks == b->n_chunks && a->n_slices == b->n_slices && a->n_chains == b->n_chains &&
                   a->method == b->method && a->split == b->split && a->lower_bound == b->lower_bound,
               "another plan");
    FUZZ_CHECK(memcmp(a->chunks, b->chunks, (size_t)a->n_chunks * sizeof *a->chunks) == 0, "other chunks");
    FUZZ_CHECK(memcmp(a->slices, b->slices, (size_t)a->n_slices * sizeof *a->slices) == 0, "other slices");
    FUZZ_CHECK(memcmp(a->chains, b->chains, (size_t)a->n_chains * sizeof *a->chains) == 0, "other chains");
    FUZZ_CHECK(!a->order == !b->order, "one of them has no trees");
    if (!a->order) return;
    FUZZ_CHECK(memcmp(a->order, b->order, (size_t)a->n_sequences * sizeof *a->order) == 0, "another order");
    FUZZ_CHECK(memcmp(a->common, b->common, (size_t)a->n_sequences * sizeof *a->common) == 0, "other rows in common");
}

/* Reads again what was written of something that was read; both must be the same. */
static json_document parse_again(fuzz_text *text) {
    json_document document;
    fuzz_file("", 0);
    FUZZ_CHECK(fuzz_exit(json_parse("again", text->text, text->bytes, &document)), "what was written is no JSON");
    return document;
}

static void check_plan(const saved_plan *saved) {
    const cf_plan *plan = &saved->plan;
    cf_error error = fuzz_error();
    int sound = fuzz_result(cf_plan_validate(plan, saved->lengths, plan->n_sequences, NULL, &error), &error);
    const char *fault = NULL; /* trees are judged by the target of that name */
    fuzz_text text = {NULL, 0, 0};
    json_document document;
    saved_plan again;
    if (plan->chunks && !plan->order) fault = oracle_plan_fault(plan, saved->lengths, plan->n_sequences);
    FUZZ_CHECK(plan->order || sound == (fault == NULL), "cf_plan_validate: %s; the oracle: %s",
               sound ? "sound" : error.text, fault ? fault : "sound");
    if (!sound) return;
    FUZZ_CHECK(cf_write_plan_json(plan, NULL, fuzz_write, &text, NULL) == CF_OK, "cannot be written");
    document = parse_again(&text);
    FUZZ_CHECK(fuzz_exit(saved_plan_read(&document, &again)), "what was written cannot be read");
    check_same_plan(plan, &again.plan);
    saved_plan_free(&again);
    json_free(&document);
    fuzz_text_free(&text);
}

/* The plan that schedules are judged against: two chains, one of them with a hybrid chunk, and standalone chunks. */
static const cf_plan *judging_plan(void) {
    static const int64_t lengths[] = {7, 2, 10, 3, 4};
    static cf_plan *plan;
    cf_pack_desc pack = {0};
    pack.chunk_size = 4;
    if (plan == NULL && cf_pack(lengths, 5, &pack, &plan, NULL) != CF_OK) abort();
    return plan;
}

static void check_schedule(const saved_schedule *saved) {
    const cf_plan *plan = judging_plan();
    cf_schedule *schedule = saved->schedule;
    cf_error error = fuzz_error();
    fuzz_text text = {NULL, 0, 0};
    json_document document;
    saved_schedule again;
    char why[256] = "";
    if (!fuzz_result(cf_schedule_validate(plan, schedule, NULL, NULL, &error), &error)) return;
    if (saved->has_times) {
        int holds = saved_times_hold(plan, saved, 0, NULL, why, sizeof why);
        FUZZ_CHECK(holds == 1 || why[0] != '\0', "times do not hold, and no reason");
    }
    FUZZ_CHECK(cf_write_schedule_json(schedule, NULL, fuzz_write, &text, NULL) == CF_OK, "cannot be written");
    document = parse_again(&text);
    FUZZ_CHECK(fuzz_exit(saved_schedule_read(&document, 0, &again)), "what was written cannot be read");
    FUZZ_CHECK(again.schedule->n_actions == schedule->n_actions && again.schedule->shape.k == schedule->shape.k &&
                   memcmp(again.schedule->actions, schedule->actions,
                          (size_t)schedule->n_actions * sizeof *schedule->actions) == 0,
               "another schedule");
    saved_schedule_free(&again);
    json_free(&document);
    fuzz_text_free(&text);
}

static void read_schedules(const json_document *document, saved_format format) {
    saved_schedule schedule;
    uint32_t array = 0, node = 0, end = 1;
    if (format == SAVED_SCHEDULES) {
        if (!fuzz_exit(saved_schedules_find(document, &array))) return;
        node = array + 1;
        end = document->nodes[array].next;
    }
    for (; node < end; node = document->nodes[node].next) {
        fuzz_file("", 0);
        if (!fuzz_exit(saved_schedule_read(document, node, &schedule))) return;
        check_schedule(&schedule);
        saved_schedule_free(&schedule);
    }
}

static void run_saved(const uint8_t *data, size_t size) {
    char *text = copy_text(data, size);
    json_document document;
    saved_format format;
    saved_plan plan;
    fuzz_file("", 0);
    if (fuzz_exit(json_parse("a.json", text, size, &document))) {
        if (fuzz_exit(saved_format_of(&document, &format))) {
            if (format != SAVED_PLAN) {
                read_schedules(&document, format);
            } else if (fuzz_exit(saved_plan_read(&document, &plan))) {
                check_plan(&plan);
                saved_plan_free(&plan);
            }
        }
        json_free(&document);
    }
    free(text);
}

const fuzz_target fuzz_saved = {"saved", run_saved, 0};
