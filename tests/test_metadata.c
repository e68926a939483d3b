/* >>pack: what an attention kernel is fed with. The mask that flash_attn_varlen_func and cuDNN build from cu_seqlens
   is simulated and compared with the mask that the definition gives: a token sees itself and all before it in its
   sequence. */

#include "chunkflow.h"
#include "harness.h"
#include "oracle.h"

#include <stdlib.h>
#include <string.h>

#define COUNT(array) ((int64_t)(sizeof(array) / sizeof((array)[0])))

typedef struct token {
    int64_t sequence; /* -1: padding */
    int64_t position;
} token;

#define MOST_ROWS 300
#define MOST_KEYS 3000

/* Rows of the chunk's tensors, written from its slices. */
static void query_tokens(const cf_plan *plan, const cf_chunk *chunk, token *rows) {
    int64_t i, t;
    for (i = 0; i < chunk->padded; i++) rows[i].sequence = -1, rows[i].position = 0;
    for (i = 0; i < chunk->n_slices; i++) {
        const cf_slice *slice = &plan->slices[chunk->first_slice + i];
        for (t = 0; t < slice->length; t++) {
            rows[slice->offset + t].sequence = slice->sequence;
            rows[slice->offset + t].position = slice->begin + t;
        }
    }
}

/* Keys: the prefix of the group, then the chunk. */
static void key_tokens(const cf_plan *plan, const cf_chunk *chunk, token *keys) {
    int64_t i;
    for (i = 0; i < chunk->prefix; i++) {
        keys[i].sequence = plan->groups[chunk->group].sequence;
        keys[i].position = i;
    }
    query_tokens(plan, chunk, keys + chunk->prefix);
}

/* The mask that a kernel derives from cumulative lengths: in slice i query a sees key b if b <= a + keys - queries.
   starts: where each slice's rows begin; the plain arrays give how many there are. */
static void kernel_mask(unsigned char *mask, int64_t n_keys, int64_t n_slices, const int32_t *q, const int32_t *k,
                        const int32_t *q_starts, const int32_t *k_starts) {
    int64_t i, a, b;
    for (i = 0; i < n_slices; i++) {
        int64_t queries = q[i + 1] - q[i], keys = k[i + 1] - k[i];
        for (a = 0; a < queries; a++)
            for (b = 0; b < keys; b++)
                if (b <= a + keys - queries) mask[(q_starts[i] + a) * n_keys + k_starts[i] + b]++;
    }
}

static void check_cumulative(const int32_t *cu, int64_t n_slices, int64_t total) {
    int64_t i;
    CHECK_INT(cu[0], 0);
    for (i = 0; i < n_slices; i++) CHECK(cu[i + 1] >= cu[i]);
    CHECK_INT(cu[n_slices], total);
}

/* Entry by entry; the entries that are set must also add up to the chunk's attention pairs. */
static void check_mask(const cf_plan *plan, const cf_chunk *chunk, const cf_metadata *m) {
    static unsigned char mask[MOST_ROWS * MOST_KEYS];
    static token rows[MOST_ROWS], keys[MOST_KEYS];
    int64_t n_keys = chunk->prefix + chunk->padded, a, b, pairs = 0, wrong = 0;
    if (chunk->padded > MOST_ROWS || n_keys > MOST_KEYS) return;
    memset(mask, 0, (size_t)(chunk->padded * n_keys));
    kernel_mask(mask, n_keys, m->n_slices, m->cu_seqlens_q, m->cu_seqlens_k, m->cu_seqlens_q_padded,
                m->cu_seqlens_k_padded);
    query_tokens(plan, chunk, rows);
    key_tokens(plan, chunk, keys);
    for (a = 0; a < chunk->padded; a++) {
        for (b = 0; b < n_keys; b++) {
            int visible = rows[a].sequence >= 0 && rows[a].sequence == keys[b].sequence &&
                          keys[b].position <= rows[a].position;
            wrong += mask[a * n_keys + b] != visible; /* also where two slices overlap, which would count 2 */
            pairs += visible;
        }
    }
    CHECK_INT(wrong, 0);
    CHECK_INT(pairs, chunk->pairs);
    CHECK_INT(m->pairs, chunk->pairs);
}

static void check_ids(const cf_plan *plan, int64_t id) {
    const cf_chunk *chunk = &plan->chunks[id];
    static token rows[MOST_ROWS * 4];
    int64_t rows_wanted = chunk->padded, i;
    int32_t *positions, *sequences;
    cf_error error;
    if (rows_wanted > COUNT(rows)) return;
    positions = (int32_t *)harness_guard_new((size_t)(rows_wanted + 1) * sizeof *positions);
    sequences = (int32_t *)harness_guard_new((size_t)(rows_wanted + 1) * sizeof *sequences);
    if (rows_wanted > 0) {
        harness_poison(&error, sizeof error);
        CHECK_INT(cf_position_ids(plan, id, positions, rows_wanted - 1, &error), CF_ERROR_SPACE);
        CHECK_STR(error.field, "count");
        CHECK_INT(error.wanted, rows_wanted);
        CHECK_INT(error.got, rows_wanted - 1);
        CHECK_INT(cf_sequence_ids(plan, id, sequences, rows_wanted - 1, &error), CF_ERROR_SPACE);
        CHECK_POISON(positions, (size_t)(rows_wanted + 1) * sizeof *positions);
        CHECK_POISON(sequences, (size_t)(rows_wanted + 1) * sizeof *sequences);
    }
    CHECK_INT(cf_position_ids(plan, id, positions, rows_wanted, &error), CF_OK);
    CHECK_INT(cf_sequence_ids(plan, id, sequences, rows_wanted + 1, &error), CF_OK);
    query_tokens(plan, chunk, rows);
    for (i = 0; i < rows_wanted; i++) {
        CHECK_INT(positions[i], rows[i].position);
        CHECK_INT(sequences[i], rows[i].sequence);
    }
    CHECK_POISON(positions + rows_wanted, sizeof *positions); /* no more than asked */
    CHECK_POISON(sequences + rows_wanted, sizeof *sequences);
    harness_guard_free(positions);
    harness_guard_free(sequences);
}

/* At need - 1 refused and untouched, at need and need + 1 the same arrays, inside guard bands and inside malloc's
   block. */
static void check_chunk(const cf_plan *plan, int64_t id) {
    const cf_chunk *chunk = &plan->chunks[id];
    int64_t longest = 0, longest_k = 0, i, extra;
    size_t need = 0;
    cf_error error;
    CHECK_INT(cf_metadata_size(plan, id, &need, &error), CF_OK);
    for (i = 0; i < chunk->n_slices; i++) {
        int64_t length = plan->slices[chunk->first_slice + i].length;
        int64_t keys = length + (i == 0 ? chunk->prefix : 0);
        if (length > longest) longest = length;
        if (keys > longest_k) longest_k = keys;
    }
    for (extra = -1; extra <= 1; extra++) {
        size_t bytes = (size_t)((int64_t)need + extra);
        void *memory = extra == 0 ? malloc(bytes) : harness_guard_new(bytes);
        cf_metadata m;
        harness_poison(&m, sizeof m);
        harness_poison(&error, sizeof error);
        if (extra < 0) {
            CHECK_INT(cf_metadata_fill(plan, id, memory, bytes, &m, &error), CF_ERROR_SPACE);
            CHECK_STR(error.field, "bytes");
            CHECK_INT(error.wanted, need);
            CHECK_INT(error.got, bytes);
            CHECK_POISON(&m, sizeof m);
            CHECK_POISON(memory, bytes);
        } else if (CHECK_INT(cf_metadata_fill(plan, id, memory, bytes, &m, &error), CF_OK)) {
            CHECK_POISON(&error, sizeof error);
            CHECK(m.chunk == id && m.n_slices == chunk->n_slices && m.tokens == chunk->tokens);
            CHECK(m.padded == chunk->padded && m.prefix == chunk->prefix);
            CHECK_INT(m.max_seqlen_q, longest);
            CHECK_INT(m.max_seqlen_k, longest_k);
            check_cumulative(m.cu_seqlens_q, m.n_slices, chunk->tokens);
            check_cumulative(m.cu_seqlens_k, m.n_slices, chunk->prefix + chunk->tokens);
            check_cumulative(m.cu_seqlens_q_padded, m.n_slices, chunk->padded);
            check_cumulative(m.cu_seqlens_k_padded, m.n_slices, chunk->prefix + chunk->padded);
            for (i = 0; i < chunk->n_slices; i++)
                CHECK_INT(m.cu_seqlens_q_padded[i], plan->slices[chunk->first_slice + i].offset);
            if (plan->align == 1) {
                size_t array = (size_t)(m.n_slices + 1) * sizeof(int32_t);
                CHECK(memcmp(m.cu_seqlens_q, m.cu_seqlens_q_padded, array) == 0);
                CHECK(memcmp(m.cu_seqlens_k, m.cu_seqlens_k_padded, array) == 0);
            }
            check_mask(plan, chunk, &m);
        }
        if (extra == 0) free(memory);
        else harness_guard_free(memory);
    }
}

TEST(masks_ids_and_sizes_of_random_plans) {
    static oracle_batch batch;
    int i;
    for (i = 0; i < 700; i++) {
        uint64_t seed = 30000000 + (uint64_t)i;
        harness_rng rng = {seed};
        cf_plan *plan = NULL;
        size_t any = 0, need, most = 0;
        int64_t c;
        oracle_draw(&rng, &batch, 14);
        if (batch.desc.chunk_size > 256) continue;
        oracle_note(seed, &batch);
        REQUIRE(cf_pack(batch.lengths, batch.n, &batch.desc, &plan, NULL) == CF_OK);
        for (c = 0; c < plan->n_chunks; c++) {
            check_chunk(plan, c);
            check_ids(plan, c);
            CHECK_INT(cf_metadata_size(plan, c, &need, NULL), CF_OK);
            if (need > most) most = need;
            CHECK_INT(cf_chunk_state_tokens(plan, c),
                      plan->chunks[c].group < 0 ? 0 : plan->slices[plan->chunks[c].first_slice].length);
        }
        CHECK_INT(cf_metadata_size(plan, -1, &any, NULL), CF_OK);
        if (plan->n_chunks > 0) CHECK_INT(any, most);
        cf_plan_free(plan);
    }
}

/* Numbers worked out by hand: sequence 0 of 10 tokens in chunks of 4, its tail of 2 shares with sequence 1 of 2
   tokens. */
TEST(a_hybrid_chunk_by_hand) {
    const int64_t lengths[] = {10, 2};
    const int32_t q[] = {0, 2, 4}, k[] = {0, 10, 12}, positions[] = {8, 9, 0, 1}, sequences[] = {0, 0, 1, 1};
    cf_pack_desc desc;
    cf_plan *plan = NULL;
    cf_metadata m;
    int32_t memory[100], ids[4];
    memset(&desc, 0, sizeof desc);
    desc.chunk_size = 4;
    REQUIRE(cf_pack(lengths, 2, &desc, &plan, NULL) == CF_OK);
    CHECK_INT(plan->n_chunks, 3);
    REQUIRE(cf_metadata_fill(plan, 2, memory, sizeof memory, &m, NULL) == CF_OK);
    CHECK(memcmp(m.cu_seqlens_q, q, sizeof q) == 0);
    CHECK(memcmp(m.cu_seqlens_k, k, sizeof k) == 0);
    CHECK(m.max_seqlen_q == 2 && m.max_seqlen_k == 10 && m.prefix == 8);
    CHECK_INT(m.pairs, 9 + 10 + 1 + 2);
    CHECK_INT(cf_position_ids(plan, 2, ids, 4, NULL), CF_OK);
    CHECK(memcmp(ids, positions, sizeof ids) == 0);
    CHECK_INT(cf_sequence_ids(plan, 2, ids, 4, NULL), CF_OK);
    CHECK(memcmp(ids, sequences, sizeof ids) == 0);
    cf_plan_free(plan);
}

TEST(padded_and_plain_lengths_by_hand) {
    const int64_t lengths[] = {21, 3, 2};
    const int32_t q[] = {0, 5, 8, 10}, k[] = {0, 21, 24, 26};
    const int32_t q_padded[] = {0, 8, 12, 16}, k_padded[] = {0, 24, 28, 32};
    const int32_t positions[] = {16, 17, 18, 19, 20, 0, 0, 0, 0, 1, 2, 0, 0, 1, 0, 0};
    const int32_t sequences[] = {0, 0, 0, 0, 0, -1, -1, -1, 1, 1, 1, -1, 2, 2, -1, -1};
    cf_pack_desc desc;
    cf_plan *plan = NULL;
    cf_metadata m;
    int32_t memory[100], ids[16];
    memset(&desc, 0, sizeof desc);
    desc.chunk_size = 16;
    desc.align = 4;
    REQUIRE(cf_pack(lengths, 3, &desc, &plan, NULL) == CF_OK);
    CHECK_INT(plan->n_chunks, 2);
    REQUIRE(cf_metadata_fill(plan, 1, memory, sizeof memory, &m, NULL) == CF_OK);
    CHECK(memcmp(m.cu_seqlens_q, q, sizeof q) == 0);
    CHECK(memcmp(m.cu_seqlens_k, k, sizeof k) == 0);
    CHECK(memcmp(m.cu_seqlens_q_padded, q_padded, sizeof q_padded) == 0);
    CHECK(memcmp(m.cu_seqlens_k_padded, k_padded, sizeof k_padded) == 0);
    CHECK_INT(cf_position_ids(plan, 1, ids, 16, NULL), CF_OK);
    CHECK(memcmp(ids, positions, sizeof ids) == 0);
    CHECK_INT(cf_sequence_ids(plan, 1, ids, 16, NULL), CF_OK);
    CHECK(memcmp(ids, sequences, sizeof ids) == 0);
    cf_plan_free(plan);
}

TEST(an_idle_chunk_has_empty_metadata) {
    const int64_t lengths[] = {3};
    cf_pack_desc desc;
    cf_plan *plan = NULL;
    cf_metadata m;
    int32_t memory[4];
    size_t need;
    memset(&desc, 0, sizeof desc);
    desc.chunk_size = 4;
    desc.n_ranks = 2;
    REQUIRE(cf_pack(lengths, 1, &desc, &plan, NULL) == CF_OK);
    CHECK_INT(plan->n_idle, 1);
    CHECK_INT(cf_metadata_size(plan, 1, &need, NULL), CF_OK);
    CHECK_INT(need, sizeof memory);
    CHECK_INT(cf_metadata_fill(plan, 1, memory, sizeof memory, &m, NULL), CF_OK);
    CHECK(m.n_slices == 0 && m.tokens == 0 && m.max_seqlen_q == 0 && m.max_seqlen_k == 0 && m.pairs == 0);
    CHECK(m.cu_seqlens_q[0] == 0 && m.cu_seqlens_k[0] == 0);
    CHECK_INT(cf_position_ids(plan, 1, NULL, 0, NULL), CF_OK); /* no row, nothing to write */
    CHECK_INT(cf_sequence_ids(plan, 1, NULL, 0, NULL), CF_OK);
    cf_plan_free(plan);
}

/* Keys and positions are 32 bits wide. The last chunk that fits, and the first that does not. */
TEST(limits_of_32_bits) {
    const int64_t size = 1 << 30;
    const int64_t lengths[] = {2 * ((int64_t)1 << 30) + 5};
    cf_pack_desc desc;
    cf_plan *plan = NULL;
    cf_metadata m;
    cf_error error;
    int32_t memory[8], ids[5];
    memset(&desc, 0, sizeof desc);
    desc.chunk_size = size;
    REQUIRE(cf_pack(lengths, 1, &desc, &plan, NULL) == CF_OK);
    CHECK_INT(plan->n_chunks, 3);
    CHECK_INT(cf_metadata_fill(plan, 0, memory, sizeof memory, &m, &error), CF_OK);
    CHECK_INT(m.max_seqlen_k, size);
    harness_poison(&m, sizeof m);
    harness_poison(memory, sizeof memory);
    harness_poison(ids, sizeof ids);
    CHECK_INT(cf_metadata_fill(plan, 1, memory, sizeof memory, &m, &error), CF_ERROR_LIMIT); /* 2^31 keys */
    CHECK_INT(error.code, CF_ERROR_LIMIT);
    CHECK_INT(error.got, 2 * size);
    CHECK_INT(error.wanted, INT32_MAX);
    CHECK_INT(cf_metadata_fill(plan, 2, memory, sizeof memory, &m, &error), CF_ERROR_LIMIT);
    CHECK_INT(cf_position_ids(plan, 2, ids, 5, &error), CF_ERROR_LIMIT);
    CHECK_INT(error.code, CF_ERROR_LIMIT);
    CHECK_POISON(&m, sizeof m);
    CHECK_POISON(memory, sizeof memory);
    CHECK_POISON(ids, sizeof ids);
    CHECK_INT(cf_sequence_ids(plan, 2, ids, 5, &error), CF_OK); /* these are small */
    CHECK_INT(ids[4], 0);
    cf_plan_free(plan);
}

/* INT32_MAX keys in all: the largest that is allowed. */
TEST(exactly_32_bits_are_enough) {
    const int64_t lengths[] = {(int64_t)INT32_MAX, (int64_t)INT32_MAX + 1};
    int64_t i;
    for (i = 0; i < 2; i++) {
        cf_pack_desc desc;
        cf_plan *plan = NULL;
        cf_metadata m;
        int32_t memory[8], id;
        int64_t last;
        memset(&desc, 0, sizeof desc);
        desc.chunk_size = INT32_MAX / 7; /* INT32_MAX = 7 x 306783378 + 1 */
        REQUIRE(cf_pack(&lengths[i], 1, &desc, &plan, NULL) == CF_OK);
        last = plan->n_chunks - 1;
        CHECK_INT(plan->chunks[last].tokens, i + 1);
        CHECK_INT(cf_metadata_fill(plan, last, memory, sizeof memory, &m, NULL), i == 0 ? CF_OK : CF_ERROR_LIMIT);
        if (i == 0) {
            CHECK_INT(m.cu_seqlens_k[1], INT32_MAX);
            CHECK_INT(cf_position_ids(plan, last, &id, 1, NULL), CF_OK);
            CHECK_INT(id, INT32_MAX - 1);
        }
        cf_plan_free(plan);
    }
}

/* ---- arguments ---- */

TEST(metadata_refuses_bad_arguments) {
    const int64_t lengths[] = {10, 2};
    const int64_t bad_chunks[] = {-1, -2, 3, 4, INT64_MAX, INT64_MIN};
    cf_pack_desc desc;
    cf_plan *plan = NULL;
    cf_metadata m;
    cf_error error;
    int32_t memory[100], ids[4];
    size_t bytes;
    int64_t i;
    memset(&desc, 0, sizeof desc);
    desc.chunk_size = 4;
    REQUIRE(cf_pack(lengths, 2, &desc, &plan, NULL) == CF_OK);
    harness_poison(&m, sizeof m);
    harness_poison(memory, sizeof memory);
    harness_poison(ids, sizeof ids);
    harness_poison(&bytes, sizeof bytes);
    for (i = 0; i < COUNT(bad_chunks); i++) {
        harness_note("chunk %lld", (long long)bad_chunks[i]);
        CHECK_INT(cf_metadata_fill(plan, bad_chunks[i], memory, sizeof memory, &m, &error), CF_ERROR_ARGUMENT);
        CHECK_STR(error.field, "chunk");
        CHECK_INT(error.got, bad_chunks[i]);
        CHECK_INT(cf_position_ids(plan, bad_chunks[i], ids, 4, &error), CF_ERROR_ARGUMENT);
        CHECK_STR(error.field, "chunk");
        CHECK_INT(cf_sequence_ids(plan, bad_chunks[i], ids, 4, &error), CF_ERROR_ARGUMENT);
        CHECK_STR(error.field, "chunk");
        if (bad_chunks[i] == -1) continue; /* any chunk: a good argument for the size */
        CHECK_INT(cf_metadata_size(plan, bad_chunks[i], &bytes, &error), CF_ERROR_ARGUMENT);
        CHECK_STR(error.field, "chunk");
        CHECK_INT(cf_metadata_size(plan, bad_chunks[i], &bytes, NULL), CF_ERROR_ARGUMENT);
    }
    harness_note("%s", "");
    CHECK_INT(cf_metadata_size(NULL, 0, &bytes, &error), CF_ERROR_ARGUMENT);
    CHECK_STR(error.field, "plan");
    CHECK_INT(cf_metadata_size(plan, 0, NULL, &error), CF_ERROR_ARGUMENT);
    CHECK_STR(error.field, "bytes");
    CHECK_INT(cf_metadata_fill(NULL, 0, memory, sizeof memory, &m, &error), CF_ERROR_ARGUMENT);
    CHECK_STR(error.field, "plan");
    CHECK_INT(cf_metadata_fill(plan, 0, NULL, sizeof memory, &m, &error), CF_ERROR_ARGUMENT);
    CHECK_STR(error.field, "memory");
    CHECK_INT(cf_metadata_fill(plan, 0, memory, sizeof memory, NULL, &error), CF_ERROR_ARGUMENT);
    CHECK_STR(error.field, "out");
    for (i = 1; i < 4; i++) {
        CHECK_INT(cf_metadata_fill(plan, 0, (char *)memory + i, sizeof memory - 4, &m, &error), CF_ERROR_SPACE);
        CHECK_STR(error.field, "memory");
    }
    CHECK_INT(cf_position_ids(NULL, 0, ids, 4, &error), CF_ERROR_ARGUMENT);
    CHECK_STR(error.field, "plan");
    CHECK_INT(cf_sequence_ids(NULL, 0, ids, 4, &error), CF_ERROR_ARGUMENT);
    CHECK_STR(error.field, "plan");
    CHECK_INT(cf_position_ids(plan, 0, NULL, 4, &error), CF_ERROR_ARGUMENT);
    CHECK_STR(error.field, "ids");
    CHECK_INT(cf_sequence_ids(plan, 0, NULL, 4, &error), CF_ERROR_ARGUMENT);
    CHECK_STR(error.field, "ids");
    CHECK_INT(cf_position_ids(plan, 0, ids, -1, &error), CF_ERROR_SPACE);
    CHECK_STR(error.field, "count");
    CHECK_INT(cf_sequence_ids(plan, 0, ids, INT64_MIN, &error), CF_ERROR_SPACE);
    CHECK_STR(error.field, "count");
    CHECK_POISON(&m, sizeof m);
    CHECK_POISON(memory, sizeof memory);
    CHECK_POISON(ids, sizeof ids);
    CHECK_POISON(&bytes, sizeof bytes);
    cf_plan_free(plan);
}

/* Like all numbers from the caller, the index is checked. */
/* Whatever takes a pointer survives NULL. */
TEST(questions_without_a_plan_have_answers) {
    const unsigned char zero[sizeof(cf_plan_stats)] = {0};
    cf_plan_stats stats;
    harness_poison(&stats, sizeof stats);
    cf_plan_measure(NULL, NULL, &stats);
    CHECK(memcmp(&stats, zero, sizeof stats) == 0);
    cf_plan_measure(NULL, NULL, NULL);
    CHECK_INT(cf_chunk_state_tokens(NULL, 0), 0);
    CHECK(cf_cost_seconds(NULL, 1, 1) == 0);
    CHECK_INT(cf_pack_defaults(NULL).n_ranks, 1);
    CHECK_INT(cf_schedule_defaults(NULL).k, 1);
}

TEST(state_tokens_of_no_chunk_are_none) {
    const int64_t lengths[] = {10, 2};
    cf_pack_desc desc;
    cf_plan *plan = NULL;
    memset(&desc, 0, sizeof desc);
    desc.chunk_size = 4;
    REQUIRE(cf_pack(lengths, 2, &desc, &plan, NULL) == CF_OK);
    CHECK_INT(cf_chunk_state_tokens(plan, 2), 2);
    CHECK_INT(cf_chunk_state_tokens(plan, -1), 0);
    CHECK_INT(cf_chunk_state_tokens(plan, 3), 0);
    cf_plan_free(plan);
}

SUITE(metadata, CASE(masks_ids_and_sizes_of_random_plans), CASE(a_hybrid_chunk_by_hand),
      CASE(padded_and_plain_lengths_by_hand), CASE(an_idle_chunk_has_empty_metadata), CASE(limits_of_32_bits),
      CASE(exactly_32_bits_are_enough), CASE(metadata_refuses_bad_arguments), CASE(questions_without_a_plan_have_answers), CASE(state_tokens_of_no_chunk_are_none));
