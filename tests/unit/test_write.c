/* Tests >>write: JSON, read back by a strict reader that shares nothing with the writer, and compared number by
   number. */

#include "chunkflow.h"
#include "../harness.h"
#include "../reference/json.h"
#include "../reference/naive.h"
#include "../reference/oracle.h"

#include <stdlib.h>
#include <string.h>

/* ---- the reader itself ---- */

static int parses(const char *text) {
    json_document document = json_parse(text, strlen(text));
    int ok = document.fault == NULL;
    json_free(&document);
    return ok;
}

TEST(the_reader_takes_json) {
    const char *const good[] = {"0", "-0", "12", "-3.5e+10", "1E5", "\"\"", "\"a\\n\\u00e9\\\"\"", "[]", "{}", "[1,2]",
                                " { \"a\" : [ true , false , null ] } ", "[[[]]]", "{\"a\":{\"a\":1}}"};
    size_t i;
    for (i = 0; i < sizeof good / sizeof good[0]; i++) {
        harness_note("%s", good[i]);
        CHECK(parses(good[i]));
    }
}

TEST(the_reader_takes_nothing_else) {
    const char *const bad[] = {"", " ", "01", "+1", ".5", "1.", "1e", "- 1", "nul", "True", "NaN", "Infinity", "-",
                               "\"", "\"\\x\"", "\"\\u12g4\"", "\"\t\"", "[", "]", "[1,]", "[,1]", "[1 2]", "{",
                               "{\"a\"}", "{\"a\":}", "{a:1}", "{\"a\":1,}", "{\"a\":1 \"b\":2}", "{\"a\":1,\"a\":2}",
                               "1 2", "[]]", "{}x", "// 1", "'a'", "{1:2}", "\"a\" \"b\""};
    char deep[200];
    size_t i;
    for (i = 0; i < sizeof bad / sizeof bad[0]; i++) {
        harness_note("%s", bad[i]);
        CHECK(!parses(bad[i]));
    }
    memset(deep, '[', sizeof deep - 1);
    deep[sizeof deep - 1] = 0;
    CHECK(!parses(deep));
}

TEST(the_reader_finds_things) {
    const char text[] = "{\"a\": [10, {\"b\": -7}, \"x\"], \"c\": 0.25, \"d\": 1.0}";
    json_document j = json_parse(text, sizeof text - 1);
    int64_t a = json_get(&j, 0, "a");
    CHECK(j.fault == NULL);
    CHECK_INT(json_size(&j, 0), 3);
    CHECK_INT(json_size(&j, a), 3);
    CHECK(json_is_int(&j, json_at(&j, a, 0), 10));
    CHECK(!json_is_int(&j, json_at(&j, a, 0), 11));
    CHECK(json_is_int(&j, json_get(&j, json_at(&j, a, 1), "b"), -7));
    CHECK(json_is_string(&j, json_at(&j, a, 2), "x"));
    CHECK(json_double(&j, json_get(&j, 0, "c")) == 0.25);
    CHECK(!json_is_int(&j, json_get(&j, 0, "d"), 1)); /* because it is not written as an integer */
    CHECK_INT(json_get(&j, 0, "b"), -1);
    CHECK_INT(json_at(&j, a, 3), -1);
    CHECK_INT(json_get(&j, -1, "a"), -1);
    CHECK_INT(json_type_of(&j, -1), JSON_NONE);
    json_free(&j);
}

/* ---- plans ---- */

static void check_int_member(const json_document *j, int64_t object, const char *key, int64_t value) {
    if (!json_is_int(j, json_get(j, object, key), value)) FAIL("member \"%s\" is not %lld", key, (long long)value);
    CHECK(1);
}

static void check_slices(const json_document *j, int64_t array, const cf_plan *plan, const cf_chunk *chunk) {
    int64_t i;
    CHECK_INT(json_type_of(j, array), JSON_ARRAY);
    CHECK_INT(json_size(j, array), chunk->n_slices);
    for (i = 0; i < chunk->n_slices; i++) {
        const cf_slice *slice = &plan->slices[chunk->first_slice + i];
        int64_t object = json_at(j, array, i);
        check_int_member(j, object, "sequence", slice->sequence);
        check_int_member(j, object, "begin", slice->begin);
        check_int_member(j, object, "length", slice->length);
        check_int_member(j, object, "offset", slice->offset);
        check_int_member(j, object, "up", slice->up);
    }
}

static void check_plan_json(const json_document *j, const cf_plan *plan) {
    int64_t chunks = json_get(j, 0, "chunks"), chains = json_get(j, 0, "chains"), i;
    cf_plan_stats stats;
    CHECK(json_is_string(j, json_get(j, 0, "format"), "chunkflow-plan"));
    check_int_member(j, 0, "version", 3);
    check_int_member(j, 0, "chunk_size", plan->chunk_size);
    check_int_member(j, 0, "align", plan->align);
    check_int_member(j, 0, "max_slices", plan->max_slices);
    CHECK(json_is_string(j, json_get(j, 0, "method"), cf_pack_method_name(plan->method)));
    CHECK(json_is_string(j, json_get(j, 0, "split"), cf_split_method_name(plan->split)));
    check_int_member(j, 0, "n_sequences", plan->n_sequences);
    check_int_member(j, 0, "n_empty", plan->n_empty);
    check_int_member(j, 0, "n_tokens", plan->n_tokens);
    check_int_member(j, 0, "n_ranks", plan->n_ranks);
    check_int_member(j, 0, "chunks_per_rank", plan->chunks_per_rank);
    check_int_member(j, 0, "n_chunks", plan->n_chunks);
    check_int_member(j, 0, "n_idle", plan->n_idle);
    check_int_member(j, 0, "n_chains", plan->n_chains);
    check_int_member(j, 0, "n_slices", plan->n_slices);
    check_int_member(j, 0, "lower_bound", plan->lower_bound);
    cf_plan_measure(plan, NULL, &stats);
    CHECK(json_double(j, json_get(j, 0, "fill")) == stats.fill); /* to the last bit */
    CHECK_INT(json_size(j, chains), plan->n_chains);
    for (i = 0; i < plan->n_chains; i++) {
        const cf_chain *chain = &plan->chains[i];
        int64_t object = json_at(j, chains, i);
        check_int_member(j, object, "id", i);
        check_int_member(j, object, "sequence", chain->sequence);
        check_int_member(j, object, "first_chunk", chain->first_chunk);
        check_int_member(j, object, "n_chunks", chain->n_chunks);
        check_int_member(j, object, "tokens", chain->tokens);
        check_int_member(j, object, "cp", chain->cp);
    }
    CHECK_INT(json_size(j, chunks), plan->n_chunks);
    for (i = 0; i < plan->n_chunks; i++) {
        const cf_chunk *chunk = &plan->chunks[i];
        int64_t object = json_at(j, chunks, i);
        check_int_member(j, object, "id", i);
        check_int_member(j, object, "chain", chunk->chain);
        check_int_member(j, object, "index", chunk->index);
        check_int_member(j, object, "prefix", chunk->prefix);
        check_int_member(j, object, "tokens", chunk->tokens);
        check_int_member(j, object, "rows", chunk->rows);
        check_int_member(j, object, "pairs", chunk->pairs);
        check_int_member(j, object, "rank", chunk->rank);
        check_int_member(j, object, "up", chunk->up);
        check_int_member(j, object, "down", chunk->down);
        check_int_member(j, object, "below", chunk->below);
        check_int_member(j, object, "state", chunk->state);
        check_int_member(j, object, "cp", chunk->cp);
        check_slices(j, json_get(j, object, "slices"), plan, chunk);
    }
}

/* ---- schedules ---- */

static void check_action_json(const json_document *j, int64_t object, const cf_action *a) {
    int64_t keep = json_get(j, object, "keep");
    CHECK(json_is_string(j, json_get(j, object, "pass"), cf_pass_name((cf_pass)a->pass)));
    check_int_member(j, object, "chunk", a->chunk);
    check_int_member(j, object, "stage", a->stage);
    if (a->pass == CF_F || a->pass == CF_R) CHECK_INT(json_type_of(j, keep), a->keep ? JSON_TRUE : JSON_FALSE);
    else CHECK_INT(keep, -1);
}

static void check_schedule_json(const json_document *j, const cf_schedule *schedule) {
    int64_t actions = json_get(j, 0, "actions"), stage, i;
    CHECK(json_is_string(j, json_get(j, 0, "format"), "chunkflow-schedule"));
    check_int_member(j, 0, "version", 3);
    CHECK(json_is_string(j, json_get(j, 0, "kind"), cf_schedule_kind_name(schedule->kind)));
    CHECK(json_is_string(j, json_get(j, 0, "replay"), cf_replay_name(schedule->shape.replay)));
    CHECK(json_is_string(j, json_get(j, 0, "placement"), schedule->shape.placement == CF_PLACEMENT_V ? "v" : "loop"));
    CHECK_INT(json_size(j, json_get(j, 0, "limits")),
              schedule->limits.chunks_by_stage != NULL ? schedule->shape.n_stages : -1);
    for (i = 0; schedule->limits.chunks_by_stage != NULL && i < schedule->shape.n_stages; i++)
        CHECK(json_is_int(j, json_at(j, json_get(j, 0, "limits"), i), schedule->limits.chunks_by_stage[i]));
    check_int_member(j, 0, "stages", schedule->shape.n_stages);
    check_int_member(j, 0, "virtual_stages", schedule->shape.n_virtual);
    check_int_member(j, 0, "k", schedule->shape.k);
    check_int_member(j, 0, "rank", schedule->shape.rank);
    check_int_member(j, 0, "n_chunks", schedule->n_chunks);
    check_int_member(j, 0, "n_actions", schedule->n_actions);
    CHECK_INT(json_size(j, actions), schedule->shape.n_stages);
    for (stage = 0; stage < schedule->shape.n_stages; stage++) {
        int64_t list = json_at(j, actions, stage), count = schedule->first[stage + 1] - schedule->first[stage];
        CHECK_INT(json_type_of(j, list), JSON_ARRAY);
        CHECK_INT(json_size(j, list), count);
        for (i = 0; i < count; i++)
            check_action_json(j, json_at(j, list, i), &schedule->actions[schedule->first[stage] + i]);
    }
}

/* ---- both, for random plans ---- */

static int well_formed(const harness_text *s, json_document *j) {
    *j = json_parse(s->at, s->n);
    if (j->fault) FAIL("byte %llu: %s", (unsigned long long)j->fault_at, j->fault);
    CHECK(s->n > 0 && s->at[s->n - 1] == '\n');
    return j->fault == NULL;
}

TEST(what_is_written_is_what_is_there) {
    static oracle_batch batch;
    int i;
    for (i = 0; i < 400; i++) {
        uint64_t seed = 80000000 + (uint64_t)i;
        harness_rng rng = {seed};
        cf_schedule_desc order = {0};
        cf_plan *plan = NULL;
        cf_schedule *schedule = NULL;
        harness_text s;
        json_document j;
        cf_error error;
        oracle_draw(&rng, &batch, 15);
        oracle_note(seed, &batch);
        REQUIRE(cf_pack(batch.lengths, batch.n, &batch.desc, &plan, NULL) == CF_OK);
        order.shape.k = harness_between(&rng, 1, 4);
        order.shape.rank = harness_between(&rng, 0, plan->n_ranks - 1);
        order.shape.n_stages = harness_between(&rng, 1, 3);
        order.kind = CF_SCHEDULE_ZERO_BUBBLE;
        order.shape.n_virtual = harness_between(&rng, 1, 2);
        order.shape.placement = harness_chance(&rng, 0.5) ? CF_PLACEMENT_LOOP : CF_PLACEMENT_V;
        if (order.shape.n_virtual == 1) order.shape.placement = CF_PLACEMENT_LOOP;
        if (harness_chance(&rng, 0.5)) order.limits.chunks = 2 * harness_between(&rng, 1, 3);
        REQUIRE(cf_schedule_make(plan, &order, &schedule, NULL) == CF_OK);
        harness_poison(&error, sizeof error);
        memset(&s, 0, sizeof s);
        CHECK_INT(cf_write_plan_json(plan, NULL, harness_collect, &s, &error), CF_OK);
        if (well_formed(&s, &j)) check_plan_json(&j, plan);
        json_free(&j);
        free(s.at);
        memset(&s, 0, sizeof s);
        CHECK_INT(cf_write_schedule_json(schedule, NULL, harness_collect, &s, &error), CF_OK);
        if (well_formed(&s, &j)) check_schedule_json(&j, schedule);
        json_free(&j);
        free(s.at);
        if (i % 4 == 0) { /* JSON with times and bounds is valid as well */
            cf_timeline *timeline = NULL;
            REQUIRE(cf_simulate(plan, schedule, NULL, &timeline, NULL) == CF_OK);
            memset(&s, 0, sizeof s);
            CHECK_INT(cf_write_schedule_json(schedule, timeline, harness_collect, &s, &error), CF_OK);
            CHECK(well_formed(&s, &j));
            json_free(&j);
            free(s.at);
            cf_timeline_free(timeline);
        }
        CHECK_POISON(&error, sizeof error);
        cf_schedule_free(schedule);
        cf_plan_free(plan);
    }
}

/* Numbers near the limits of 64 bits, in a document that takes many pieces. */
TEST(large_numbers_are_written_whole) {
    const int64_t lengths[] = {((int64_t)1 << 36) + 12345};
    cf_pack_desc pack = {0};
    cf_plan *plan = NULL;
    harness_text s = {0};
    json_document j;
    int64_t last, object;
    pack.chunk_size = (int64_t)1 << 26; /* 1025 chunks; the pairs of a late one are near 2^62 */
    pack.max_slices = INT64_MAX;
    REQUIRE(cf_pack(lengths, 1, &pack, &plan, NULL) == CF_OK);
    last = plan->n_chunks - 2;
    CHECK(plan->chunks[last].pairs > (int64_t)1 << 61);
    CHECK_INT(cf_write_plan_json(plan, NULL, harness_collect, &s, NULL), CF_OK);
    REQUIRE(well_formed(&s, &j));
    check_int_member(&j, 0, "max_slices", INT64_MAX);
    check_int_member(&j, 0, "n_tokens", lengths[0]);
    object = json_at(&j, json_get(&j, 0, "chunks"), last);
    check_int_member(&j, object, "pairs", plan->chunks[last].pairs);
    check_int_member(&j, object, "prefix", plan->chunks[last].prefix);
    json_free(&j);
    free(s.at);
    cf_plan_free(plan);
}

/* ---- arguments of kernels and losses ---- */

static int64_t row_of(const json_document *j, int64_t metadata, const char *key, int64_t row) {
    return (int64_t)json_double(j, json_at(j, json_get(j, metadata, key), row));
}

/* Checks row by row, not slice by slice: each row is looked up among the slices of the chunk, and its target in the
   lengths. */
static void check_metadata_rows(const json_document *j, int64_t metadata, const cf_plan *plan, const cf_chunk *chunk,
                                const int64_t *lengths) {
    int64_t row, i;
    CHECK_INT(json_size(j, json_get(j, metadata, "sequence_ids")), chunk->rows);
    CHECK_INT(json_size(j, json_get(j, metadata, "position_ids")), chunk->rows);
    CHECK_INT(json_size(j, json_get(j, metadata, "target_positions")), chunk->rows);
    for (row = 0; row < chunk->rows; row++) {
        int64_t sequence = -1, position = 0;
        for (i = chunk->first_slice; i < chunk->first_slice + chunk->n_slices; i++) {
            const cf_slice *slice = &plan->slices[i];
            if (row < slice->offset || row >= slice->offset + slice->length) continue;
            sequence = slice->sequence;
            position = slice->begin + row - slice->offset;
        }
        CHECK_INT(row_of(j, metadata, "sequence_ids", row), sequence);
        CHECK_INT(row_of(j, metadata, "position_ids", row), position);
        CHECK_INT(row_of(j, metadata, "target_positions", row),
                  sequence >= 0 && position + 1 < lengths[sequence] ? position + 1 : -1);
    }
}

static const cf_write_desc with_metadata = {1, NULL};

/* cu_seqlens split the rows exactly where the sequence changes, and the first also has the prefix. All sequences of one
   chunk differ. */
static void check_metadata_cuts(const json_document *j, int64_t metadata, const cf_chunk *chunk) {
    int64_t q = json_get(j, metadata, "cu_seqlens_q"), k = json_get(j, metadata, "cu_seqlens_k"), row, n = 0, begin = 0;
    int64_t most_q = 0, most_k = 0;
    CHECK(json_is_int(j, json_at(j, q, 0), 0) && json_is_int(j, json_at(j, k, 0), 0));
    for (row = 1; row <= chunk->rows; row++) {
        int64_t before = row_of(j, metadata, "sequence_ids", row - 1);
        if (row < chunk->rows && row_of(j, metadata, "sequence_ids", row) == before) continue;
        n++;
        CHECK(json_is_int(j, json_at(j, q, n), row) && json_is_int(j, json_at(j, k, n), row + chunk->prefix));
        if (most_q < row - begin) most_q = row - begin;
        if (most_k < row - begin + (n == 1 ? chunk->prefix : 0)) most_k = row - begin + (n == 1 ? chunk->prefix : 0);
        begin = row;
    }
    CHECK_INT(json_size(j, q), n + 1);
    CHECK_INT(json_size(j, k), n + 1);
    check_int_member(j, metadata, "max_seqlen_q", most_q);
    check_int_member(j, metadata, "max_seqlen_k", most_k);
}

TEST(metadata_is_written_row_by_row) {
    uint64_t seed;
    int64_t n_padded = 0, n_prefixed = 0;
    for (seed = 1; seed <= 60; seed++) {
        harness_rng rng = {seed};
        oracle_batch batch;
        cf_plan *plan = NULL;
        harness_text s = {0};
        json_document j;
        int64_t i, chunks;
        oracle_draw(&rng, &batch, 12);
        oracle_note(seed, &batch);
        REQUIRE(cf_pack(batch.lengths, batch.n, &batch.desc, &plan, NULL) == CF_OK);
        CHECK_INT(cf_write_plan_json(plan, &with_metadata, harness_collect, &s, NULL), CF_OK);
        if (well_formed(&s, &j)) {
            check_plan_json(&j, plan);
            chunks = json_get(&j, 0, "chunks");
            for (i = 0; i < plan->n_chunks; i++) {
                int64_t metadata = json_get(&j, json_at(&j, chunks, i), "metadata");
                check_metadata_rows(&j, metadata, plan, &plan->chunks[i], batch.lengths);
                check_metadata_cuts(&j, metadata, &plan->chunks[i]);
                n_padded += plan->chunks[i].rows > plan->chunks[i].tokens;
                n_prefixed += plan->chunks[i].prefix > 0;
            }
        }
        json_free(&j);
        free(s.at);
        cf_plan_free(plan);
    }
    CHECK(n_padded > 10 && n_prefixed > 10);
}

/* ---- a callback that fails ---- */

typedef cf_result (*write_any)(const void *object, harness_text *s, cf_error *error);

static cf_result write_plan(const void *object, harness_text *s, cf_error *error) {
    return cf_write_plan_json((const cf_plan *)object, &with_metadata, harness_collect, s, error);
}

static cf_result write_schedule(const void *object, harness_text *s, cf_error *error) {
    return cf_write_schedule_json((const cf_schedule *)object, NULL, harness_collect, s, error);
}

static void check_every_failure(write_any write, const void *object) {
    int64_t at, n_calls = 0;
    for (at = 0; at <= n_calls; at++) { /* 0: no failure, to count the calls */
        harness_text s = {0};
        cf_error error;
        cf_result result;
        s.fail_at = at;
        harness_poison(&error, sizeof error);
        result = write(object, &s, &error);
        if (at == 0) {
            CHECK_INT(result, CF_OK);
            n_calls = s.calls;
        } else {
            CHECK_INT(result, CF_ERROR_WRITE);
            CHECK_INT(error.code, CF_ERROR_WRITE);
            CHECK_INT(error.item, -1);
            CHECK_INT(error.wanted, 0);
            CHECK_INT(error.got, HARNESS_REFUSAL);
            CHECK_STR(error.field, "write");
            CHECK(strchr(error.text, '[') == NULL);
            CHECK_INT(s.calls_after_failure, 0);
            s.calls = 0;
            CHECK_INT(write(object, &s, NULL), CF_ERROR_WRITE); /* the record is optional */
        }
        free(s.at);
    }
    CHECK(n_calls >= 3); /* with one piece this would show nothing */
}

TEST(a_failing_callback_is_reported_at_every_call) {
    static int64_t lengths[300];
    cf_schedule_desc order;
    cf_plan *plan = NULL;
    cf_schedule *schedule = NULL;
    harness_rng rng = {9};
    int i;
    for (i = 0; i < 300; i++) lengths[i] = harness_between(&rng, 1, 40);
    memset(&order, 0, sizeof order);
    order.kind = CF_SCHEDULE_PAPER;
    REQUIRE((plan = naive_pack(lengths, 300, 16)) != NULL);
    REQUIRE(cf_schedule_make(plan, &order, &schedule, NULL) == CF_OK);
    check_every_failure(write_plan, plan);
    check_every_failure(write_schedule, schedule);
    cf_schedule_free(schedule);
    cf_plan_free(plan);
}

TEST(write_refuses_bad_arguments) {
    const int64_t lengths[] = {5};
    cf_schedule_desc order = {0};
    cf_plan *plan = NULL, bad;
    cf_schedule *schedule = NULL;
    cf_error error;
    harness_text s = {0};
    REQUIRE((plan = naive_pack(lengths, 1, 4)) != NULL);
    REQUIRE(cf_schedule_make(plan, &order, &schedule, NULL) == CF_OK);
    CHECK_INT(cf_write_plan_json(NULL, NULL, harness_collect, &s, &error), CF_ERROR_ARGUMENT);
    CHECK_STR(error.field, "plan");
    CHECK_INT(cf_write_plan_json(plan, NULL, NULL, &s, &error), CF_ERROR_ARGUMENT);
    CHECK_STR(error.field, "write");
    CHECK_INT(cf_write_schedule_json(NULL, NULL, harness_collect, &s, &error), CF_ERROR_ARGUMENT);
    CHECK_STR(error.field, "schedule");
    CHECK_INT(cf_write_schedule_json(schedule, NULL, NULL, &s, &error), CF_ERROR_ARGUMENT);
    CHECK_STR(error.field, "write");
    CHECK_INT(cf_write_plan_json(NULL, NULL, harness_collect, &s, NULL), CF_ERROR_ARGUMENT);
    CHECK_INT(cf_write_schedule_json(NULL, NULL, harness_collect, &s, NULL), CF_ERROR_ARGUMENT);
    bad = *plan;
    bad.n_chunks = -1;
    CHECK_INT(cf_write_plan_json(&bad, NULL, harness_collect, &s, &error), CF_ERROR_PLAN);
    CHECK_STR(error.field, "n_chunks");
    CHECK_INT(s.calls, 0); /* nothing was written */
    cf_schedule_free(schedule);
    cf_plan_free(plan);
}

SUITE(write, CASE(the_reader_takes_json), CASE(the_reader_takes_nothing_else), CASE(the_reader_finds_things),
      CASE(what_is_written_is_what_is_there), CASE(large_numbers_are_written_whole),
      CASE(metadata_is_written_row_by_row),
      CASE(a_failing_callback_is_reported_at_every_call), CASE(write_refuses_bad_arguments));
