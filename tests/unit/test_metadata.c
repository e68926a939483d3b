/* Tests >>metadata: the arguments of a chunk's kernels and of its loss. The mask that flash_attn_varlen_func builds
   from cu_seqlens is simulated and compared with the definition: a token sees itself and all earlier tokens of its
   sequence. Loss means are compared with plain sums over whole sequences. */

#include "chunkflow.h"
#include "../harness.h"
#include "../reference/naive.h"
#include "../reference/oracle.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

/* Stack memory, aligned as the library requires; few types guarantee that on every machine. */
enum { MEMORY_BYTES = 512 };
typedef struct stack_memory {
    unsigned char bytes[MEMORY_BYTES + CF_MEMORY_ALIGNMENT];
} stack_memory;

static void *aligned(stack_memory *room) {
    return room->bytes + (CF_MEMORY_ALIGNMENT - (uintptr_t)room->bytes % CF_MEMORY_ALIGNMENT) % CF_MEMORY_ALIGNMENT;
}

typedef struct token {
    int64_t sequence; /* -1: padding */
    int64_t position;
} token;

#define MOST_ROWS 600
#define MOST_KEYS 4000

/* Writes the first `n` rows of the chunk's tensors, from its slices. */
static void query_tokens(const cf_plan *plan, const cf_chunk *chunk, int64_t n, token *rows) {
    int64_t i, t;
    for (i = 0; i < n; i++) rows[i].sequence = -1, rows[i].position = 0;
    for (i = 0; i < chunk->n_slices; i++) {
        const cf_slice *slice = &plan->slices[chunk->first_slice + i];
        for (t = 0; t < slice->length; t++) {
            rows[slice->offset + t].sequence = slice->sequence;
            rows[slice->offset + t].position = slice->begin + t;
        }
    }
}

/* Writes the keys: the prefix of the chain, then the chunk. */
static void key_tokens(const cf_plan *plan, const cf_chunk *chunk, int64_t n, token *keys) {
    int64_t i;
    for (i = 0; i < chunk->prefix; i++) {
        keys[i].sequence = plan->chains[chunk->chain].sequence;
        keys[i].position = i;
    }
    query_tokens(plan, chunk, n, keys + chunk->prefix);
}

/* Does what flash_attn_varlen_func does. Sequence i has the rows from cu_seqlens[i] on, and a grid as large as
   max_seqlen covers all of them. Query a sees key b if b <= a + keys - queries. written: how often each row of the
   result is written. */
static void kernel_mask(unsigned char *mask, unsigned char *written, int64_t n_keys, const cf_metadata *m) {
    int64_t i, a, b;
    for (i = 0; i < m->n_seqs; i++) {
        int64_t first_q = m->cu_seqlens_q[i], queries = m->cu_seqlens_q[i + 1] - first_q;
        int64_t first_k = m->cu_seqlens_k[i], keys = m->cu_seqlens_k[i + 1] - first_k;
        for (a = 0; a < queries && a < m->max_seqlen_q; a++) {
            written[first_q + a]++;
            for (b = 0; b < keys && b < m->max_seqlen_k; b++)
                if (b <= a + keys - queries) mask[(first_q + a) * n_keys + first_k + b]++;
        }
    }
}

/* Compares entry by entry for the tokens. Padding must be written, and sees no token. The entries of tokens must also
   add up to the chunk's attention pairs. */
static void check_mask(const cf_plan *plan, const cf_chunk *chunk, const cf_metadata *m) {
    static unsigned char mask[MOST_ROWS * MOST_KEYS], written[MOST_ROWS];
    static token rows[MOST_ROWS], keys[MOST_KEYS];
    int64_t n_keys = chunk->prefix + m->rows, a, b, pairs = 0, wrong = 0, unwritten = 0, ends_wrong = 0;
    REQUIRE(m->rows <= MOST_ROWS && n_keys <= MOST_KEYS);
    memset(mask, 0, (size_t)(m->rows * n_keys));
    memset(written, 0, sizeof written);
    kernel_mask(mask, written, n_keys, m);
    query_tokens(plan, chunk, m->rows, rows);
    key_tokens(plan, chunk, m->rows, keys);
    for (a = 0; a < m->rows; a++) {
        unwritten += written[a] != 1;
        for (b = 0; b < n_keys; b++) {
            int both = rows[a].sequence >= 0 && keys[b].sequence >= 0;
            int visible = both && rows[a].sequence == keys[b].sequence && keys[b].position <= rows[a].position;
            if (rows[a].sequence >= 0 || keys[b].sequence >= 0) wrong += mask[a * n_keys + b] != visible;
            pairs += visible;
            if (m->key_ends == NULL) continue;
            if (rows[a].sequence < 0) visible = b == chunk->prefix + a; /* padding sees itself */
            ends_wrong += (b <= chunk->prefix + a && a < m->key_ends[b]) != visible;
        }
    }
    CHECK_INT(ends_wrong, 0);
    CHECK_INT(wrong, 0);
    CHECK_INT(unwritten, 0);
    CHECK_INT(m->cu_seqlens_k[m->n_seqs], n_keys); /* dK and dV of every key are also written */
    CHECK_INT(pairs, chunk->pairs);
    CHECK_INT(m->pairs, chunk->pairs);
}

/* Compares row by row with the definition: a token's target is the next token of its sequence. */
static void check_rows(const cf_plan *plan, const cf_chunk *chunk, const cf_metadata *m, const int64_t *lengths) {
    static token rows[MOST_ROWS];
    int64_t i, n = 0;
    query_tokens(plan, chunk, m->rows, rows);
    for (i = 0; i < m->rows; i++) {
        int64_t sequence = rows[i].sequence, next = rows[i].position + 1;
        CHECK_INT(m->sequence_ids[i], sequence);
        CHECK_INT(m->position_ids[i], rows[i].position);
        CHECK_INT(m->target_positions[i], sequence < 0 || next == lengths[sequence] ? -1 : next);
        if (m->target_positions[i] < 0 || m->loss_rows == NULL) continue;
        if (CHECK(n < m->n_loss_rows)) CHECK_INT(m->loss_rows[n++], i);
    }
    CHECK_INT(n, m->n_loss_rows);
}

/* Checks that cu_seqlens never decrease, and that max_seqlen is exactly the longest sequence, because a kernel's grid
   is made from it. */
static void check_lengths(const cf_metadata *m) {
    int64_t i, q = 0, k = 0;
    CHECK(m->cu_seqlens_q[0] == 0 && m->cu_seqlens_k[0] == 0);
    for (i = 0; i < m->n_seqs; i++) {
        int64_t queries = m->cu_seqlens_q[i + 1] - m->cu_seqlens_q[i];
        int64_t keys = m->cu_seqlens_k[i + 1] - m->cu_seqlens_k[i];
        CHECK(queries > 0 && keys >= queries);
        if (queries > q) q = queries;
        if (keys > k) k = keys;
    }
    CHECK(m->max_seqlen_q == q && m->max_seqlen_k == k);
}

/* With one byte too few the call is refused and writes nothing. With the exact size and one more it gives the same
   arrays, inside guard bands. Every second chunk also asks for the rows with a loss, every third for the ends of
   keys. */
static void check_chunk(const cf_plan *plan, int64_t id, const int64_t *lengths) {
    const cf_chunk *chunk = &plan->chunks[id];
    const cf_metadata_desc wants = {.wants_loss_rows = id % 2 == 1, .wants_key_ends = id % 3 == 1};
    const cf_metadata_desc *desc = id % 6 != 0 ? &wants : NULL;
    int64_t extra;
    size_t need = 0;
    cf_error error;
    CHECK_INT(cf_metadata_size(plan, id, desc, &need, &error), CF_OK);
    for (extra = -1; extra <= 1; extra++) {
        size_t bytes = (size_t)((int64_t)need + extra);
        void *memory = harness_guard_new(bytes);
        cf_metadata m;
        harness_poison(&m, sizeof m);
        harness_poison(&error, sizeof error);
        if (extra < 0) {
            CHECK_INT(cf_metadata_fill(plan, id, desc, memory, bytes, &m, &error), CF_ERROR_SPACE);
            CHECK_STR(error.field, "bytes");
            CHECK_INT(error.wanted, need);
            CHECK_INT(error.got, bytes);
            CHECK_POISON(&m, sizeof m);
            CHECK_POISON(memory, bytes);
        } else if (CHECK_INT(cf_metadata_fill(plan, id, desc, memory, bytes, &m, &error), CF_OK)) {
            CHECK_POISON(&error, sizeof error);
            CHECK(m.chunk == id && m.tokens == chunk->tokens && m.rows == chunk->rows && m.prefix == chunk->prefix);
            CHECK(m.loss_weights == NULL);
            if (desc == NULL) CHECK_INT(need, (size_t)(2 * (m.n_seqs + 1) + 3 * m.rows) * sizeof(int32_t));
            CHECK((m.loss_rows != NULL) == (wants.wants_loss_rows && m.rows > 0));
            CHECK((m.key_ends != NULL) == (wants.wants_key_ends && m.rows > 0));
            if (plan->align == 1) CHECK_INT(m.n_seqs, chunk->n_slices);
            check_lengths(&m);
            check_rows(plan, chunk, &m, lengths);
            check_mask(plan, chunk, &m);
        }
        harness_guard_free(memory);
    }
}

TEST(masks_rows_and_sizes_of_random_plans) {
    static oracle_batch batch;
    int i;
    for (i = 0; i < harness_rounds(700, 75); i++) {
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
            if (plan->chunks[c].prefix + plan->chunks[c].rows <= MOST_KEYS) check_chunk(plan, c, batch.lengths);
            CHECK_INT(cf_metadata_size(plan, c, NULL, &need, NULL), CF_OK);
            if (need > most) most = need;
            CHECK_INT(plan->chunks[c].state,
                      plan->chunks[c].chain < 0 ? 0 : plan->slices[plan->chunks[c].first_slice].length);
        }
        CHECK_INT(cf_metadata_size(plan, -1, NULL, &any, NULL), CF_OK);
        CHECK_INT(any, most);
        cf_plan_free(plan);
    }
}

/* ---- alignment, and arrays of one size for all chunks ---- */

/* Returns a capacity for this plan, exact or with something to spare. */
static cf_capacity some_capacity(harness_rng *rng, const cf_plan *plan) {
    cf_capacity most = {0, 0, 0, 0, 0, 0, 0};
    CHECK_INT(cf_steps_capacity(plan, NULL, &most, NULL), CF_OK);
    if (harness_chance(rng, 0.5)) return most;
    most.rows += harness_between(rng, 0, 20);
    most.prefix += harness_between(rng, 0, 20);
    most.n_seqs += harness_between(rng, 0, 5);
    return most;
}

/* Checks everything that a graph of kernels was recorded with: addresses, counts, grids. */
static void check_static(const cf_metadata *m, const cf_metadata *first, const cf_capacity *most) {
    int64_t i;
    CHECK(m->rows == most->rows && m->n_seqs == most->n_seqs);
    CHECK(m->max_seqlen_q == most->rows && m->max_seqlen_k == most->prefix + most->rows);
    CHECK(m->cu_seqlens_q == first->cu_seqlens_q && m->cu_seqlens_k == first->cu_seqlens_k);
    CHECK(m->sequence_ids == first->sequence_ids && m->position_ids == first->position_ids);
    CHECK(m->target_positions == first->target_positions && m->loss_weights == first->loss_weights);
    for (i = 0; i < m->n_seqs; i++)
        CHECK(m->cu_seqlens_q[i + 1] >= m->cu_seqlens_q[i] && m->cu_seqlens_k[i + 1] >= m->cu_seqlens_k[i]);
    CHECK_INT(m->cu_seqlens_q[m->n_seqs], most->rows);
}

/* Fills one block of the capacity's size with every chunk of a plan in turn. */
static void check_capacity(harness_rng *rng, const cf_plan *plan, const int64_t *lengths) {
    const cf_capacity most = some_capacity(rng, plan);
    cf_metadata_desc desc = {&most, NULL, NULL, 0, 0, 1, 0};
    cf_metadata m, first;
    size_t any = 0, one = 0;
    int64_t c;
    void *memory;
    CHECK_INT(cf_metadata_size(plan, -1, &desc, &any, NULL), CF_OK);
    memory = harness_guard_new(any);
    for (c = 0; c < plan->n_chunks; c++) {
        CHECK_INT(cf_metadata_size(plan, c, &desc, &one, NULL), CF_OK);
        CHECK_INT(one, any);
        if (!CHECK_INT(cf_metadata_fill(plan, c, &desc, memory, any, &m, NULL), CF_OK)) continue;
        if (c == 0) first = m;
        check_static(&m, &first, &most);
        check_rows(plan, &plan->chunks[c], &m, lengths);
        check_mask(plan, &plan->chunks[c], &m);
    }
    harness_guard_free(memory);
}

TEST(a_varlen_kernel_sees_what_it_should_for_every_alignment) {
    static const int64_t aligns[] = {1, 8, 16, 64};
    harness_rng rng = {17};
    int64_t at, i, c;
    int split, round;
    for (at = 0; at < COUNT(aligns); at++)
        for (split = CF_SPLIT_FULL; split <= CF_SPLIT_COST; split++)
            for (round = 0; round < harness_rounds(8, 2); round++) {
                int64_t lengths[12];
                cf_pack_desc desc = {0};
                cf_plan *plan = NULL;
                desc.chunk_size = 128;
                desc.align = aligns[at];
                desc.split = (cf_split_method)split;
                desc.n_ranks = round % 2 + 1;
                for (i = 0; i < 12; i++) lengths[i] = harness_between(&rng, 0, i < 3 ? 700 : 100);
                REQUIRE(cf_pack(lengths, 12, &desc, &plan, NULL) == CF_OK);
                harness_note("align %d, split %d, round %d", (int)aligns[at], split, round);
                for (c = 0; c < plan->n_chunks; c++) check_chunk(plan, c, lengths);
                check_capacity(&rng, plan, lengths);
                cf_plan_free(plan);
            }
}

TEST(a_capacity_that_is_too_small_is_refused) {
    const int64_t lengths[] = {21, 3, 2};
    const char *const fields[] = {"capacity.rows", "capacity.prefix", "capacity.n_seqs"};
    cf_pack_desc desc = {0};
    cf_plan *plan = NULL;
    cf_error error;
    size_t bytes;
    int i, huge;
    desc.chunk_size = 16;
    desc.align = 4;
    REQUIRE(cf_pack(lengths, 3, &desc, &plan, NULL) == CF_OK);
    harness_poison(&bytes, sizeof bytes);
    for (i = 0; i < 3; i++)
        for (huge = 0; huge < 4; huge++) {
            cf_capacity most = {16, 16, 6, 0, 0, 0, 0};
            const int64_t wrong[] = {(&most.rows)[i] - 1, -1, (int64_t)INT32_MAX + 1, INT64_MAX};
            cf_metadata_desc how = {&most, NULL, NULL, 0, 0, 0, 0};
            CHECK_INT(cf_metadata_size(plan, 1, &how, &bytes, NULL), CF_OK);
            harness_poison(&bytes, sizeof bytes);
            if (i == 0) most.rows = wrong[huge];
            if (i == 1) most.prefix = wrong[huge];
            if (i == 2) most.n_seqs = wrong[huge];
            CHECK_INT(cf_metadata_size(plan, 1, &how, &bytes, &error), huge < 2 ? CF_ERROR_ARGUMENT : CF_ERROR_LIMIT);
            CHECK_STR(error.field, fields[i]);
            CHECK_INT(error.got, wrong[huge]);
        }
    CHECK_POISON(&bytes, sizeof bytes);
    cf_plan_free(plan);
}

/* Prefix and rows of a capacity are added in 32 bits, in cu_seqlens_k and max_seqlen_k. */
TEST(a_capacity_up_to_32_bits) {
    static const int64_t rows[] = {16, 17, 100, 4096};
    const int64_t lengths[] = {21, 3, 2};
    cf_pack_desc desc = {0};
    cf_plan *plan = NULL;
    cf_error error;
    int i;
    desc.chunk_size = 16;
    desc.align = 4;
    REQUIRE(cf_pack(lengths, 3, &desc, &plan, NULL) == CF_OK);
    for (i = 0; i < COUNT(rows); i++) {
        cf_capacity most = {rows[i], INT32_MAX - rows[i], 6, 0, 0, 0, 0};
        cf_metadata_desc how = {&most, NULL, NULL, 0, 0, 0, 0};
        cf_metadata m;
        size_t bytes = 0;
        void *memory;
        REQUIRE(cf_metadata_size(plan, 1, &how, &bytes, &error) == CF_OK);
        memory = malloc(bytes);
        REQUIRE(memory != NULL);
        if (CHECK_INT(cf_metadata_fill(plan, 1, &how, memory, bytes, &m, &error), CF_OK)) {
            CHECK_INT(m.max_seqlen_k, INT32_MAX);
            CHECK_INT(m.max_seqlen_q, rows[i]);
        }
        free(memory);
        most.prefix++;
        CHECK_INT(cf_metadata_size(plan, 1, &how, &bytes, &error), CF_ERROR_LIMIT);
        CHECK_STR(error.field, "capacity.prefix");
        CHECK_INT(error.wanted, INT32_MAX - rows[i]);
    }
    cf_plan_free(plan);
}

/* ---- by hand ---- */

/* Sequence 0 of 10 tokens in chunks of 4; its last chunk of 2 also has sequence 1 of 2 tokens. */
TEST(a_hybrid_chunk_by_hand) {
    const int64_t lengths[] = {10, 2};
    const int32_t q[] = {0, 2, 4}, k[] = {0, 10, 12}, positions[] = {8, 9, 0, 1}, sequences[] = {0, 0, 1, 1};
    const int32_t targets[] = {9, -1, 1, -1}, targets_before[] = {5, 6, 7, 8};
    cf_plan *plan = NULL;
    cf_metadata m;
    stack_memory room;
    void *const memory = aligned(&room);
    REQUIRE((plan = naive_pack(lengths, 2, 4)) != NULL);
    CHECK_INT(plan->n_chunks, 3);
    REQUIRE(cf_metadata_fill(plan, 2, NULL, memory, MEMORY_BYTES, &m, NULL) == CF_OK);
    CHECK(memcmp(m.cu_seqlens_q, q, sizeof q) == 0);
    CHECK(memcmp(m.cu_seqlens_k, k, sizeof k) == 0);
    CHECK(m.n_seqs == 2 && m.max_seqlen_q == 2 && m.max_seqlen_k == 10 && m.prefix == 8);
    CHECK_INT(m.pairs, 9 + 10 + 1 + 2);
    CHECK(memcmp(m.position_ids, positions, sizeof positions) == 0);
    CHECK(memcmp(m.sequence_ids, sequences, sizeof sequences) == 0);
    CHECK(memcmp(m.target_positions, targets, sizeof targets) == 0);
    REQUIRE(cf_metadata_fill(plan, 1, NULL, memory, MEMORY_BYTES, &m, NULL) == CF_OK);
    CHECK(memcmp(m.target_positions, targets_before, sizeof targets_before) == 0); /* position 8 is in the next chunk */
    cf_plan_free(plan);
}

/* Padding after the slices of 5, 3 and 2 tokens; then the same in arrays of 20 rows and 8 sequences, with a prefix of
   up to 30. Weights are 2, 3 and 4. The token at position 18 of sequence 0 is not a target. */
TEST(padding_by_hand) {
    const int64_t lengths[] = {21, 3, 2};
    const int32_t q[] = {0, 5, 8, 11, 12, 14, 16, 16, 16}, k[] = {0, 21, 24, 27, 28, 30, 32};
    const int32_t q_static[] = {0, 5, 8, 11, 12, 14, 20, 20, 20}, k_static[] = {0, 21, 24, 27, 28, 30, 36, 36, 36};
    const int32_t positions[] = {16, 17, 18, 19, 20, 0, 0, 0, 0, 1, 2, 0, 0, 1, 0, 0, 0, 0, 0, 0};
    const int32_t sequences[] = {0, 0, 0, 0, 0, -1, -1, -1, 1, 1, 1, -1, 2, 2, -1, -1, -1, -1, -1, -1};
    const int32_t targets[] = {17, -1, 19, 20, -1, -1, -1, -1, 1, 2, -1, -1, 1, -1, -1, -1, -1, -1, -1, -1};
    const double weights[] = {2, 3, 4}, row_weights[] = {2, 0, 2, 2, 0, 0, 0, 0, 3, 3, 0, 0, 4, 0, 0, 0, 0, 0, 0, 0};
    unsigned char ignored[21] = {0};
    const unsigned char *const masks[] = {ignored, NULL, NULL};
    const cf_capacity most = {20, 30, 8, 0, 0, 0, 0};
    cf_metadata_desc how = {NULL, masks, weights, 0, 0, 0, 0};
    cf_pack_desc desc;
    cf_plan *plan = NULL;
    cf_metadata m;
    stack_memory room;
    void *const memory = aligned(&room);
    int fixed;
    ignored[18] = 1;
    memset(&desc, 0, sizeof desc);
    desc.chunk_size = 16;
    desc.align = 4;
    REQUIRE(cf_pack(lengths, 3, &desc, &plan, NULL) == CF_OK);
    CHECK_INT(plan->n_chunks, 2);
    for (fixed = 0; fixed < 2; fixed++) {
        size_t rows = fixed ? 20 : 16;
        if (fixed) how.capacity = &most;
        REQUIRE(cf_metadata_fill(plan, 1, &how, memory, MEMORY_BYTES, &m, NULL) == CF_OK);
        CHECK(m.rows == (int64_t)rows && m.n_seqs == (fixed ? 8 : 6) && m.tokens == 10);
        CHECK(m.max_seqlen_q == (fixed ? 20 : 5) && m.max_seqlen_k == (fixed ? 50 : 21));
        CHECK(memcmp(m.cu_seqlens_q, fixed ? q_static : q, (fixed ? 9 : 7) * sizeof *q) == 0);
        CHECK(memcmp(m.cu_seqlens_k, fixed ? k_static : k, (fixed ? 9 : 7) * sizeof *k) == 0);
        CHECK(memcmp(m.position_ids, positions, rows * sizeof *positions) == 0);
        CHECK(memcmp(m.sequence_ids, sequences, rows * sizeof *sequences) == 0);
        CHECK(memcmp(m.target_positions, targets, rows * sizeof *targets) == 0);
        CHECK(memcmp(m.loss_weights, row_weights, rows * sizeof *row_weights) == 0);
    }
    how.weights = NULL; /* targets are the same without weights */
    REQUIRE(cf_metadata_fill(plan, 1, &how, memory, MEMORY_BYTES, &m, NULL) == CF_OK);
    CHECK(memcmp(m.target_positions, targets, sizeof targets) == 0 && m.loss_weights == NULL);
    cf_plan_free(plan);
}

TEST(an_idle_chunk_has_empty_metadata) {
    const int64_t lengths[] = {3};
    const double weight = 0.5;
    cf_capacity most = {0, 0, 0, 0, 0, 0, 0};
    cf_metadata_desc how = {&most, NULL, NULL, 0, 0, 0, 0};
    cf_pack_desc desc = {0};
    cf_plan *plan = NULL;
    cf_metadata m;
    stack_memory room;
    void *const memory = aligned(&room);
    size_t need;
    desc.chunk_size = 4;
    desc.n_ranks = 2;
    REQUIRE(cf_pack(lengths, 1, &desc, &plan, NULL) == CF_OK);
    CHECK_INT(plan->n_idle, 1);
    CHECK_INT(cf_metadata_size(plan, 1, NULL, &need, NULL), CF_OK);
    CHECK_INT(need, 2 * sizeof(int32_t));
    CHECK_INT(cf_metadata_fill(plan, 1, NULL, memory, need, &m, NULL), CF_OK);
    CHECK(m.n_seqs == 0 && m.tokens == 0 && m.rows == 0 && m.max_seqlen_q == 0 && m.max_seqlen_k == 0 && m.pairs == 0);
    CHECK(m.cu_seqlens_q[0] == 0 && m.cu_seqlens_k[0] == 0 && m.loss_weights == NULL);
    how.capacity = NULL;
    how.weights = &weight;
    CHECK_INT(cf_metadata_fill(plan, 1, &how, memory, need, &m, NULL), CF_OK);
    CHECK(m.loss_weights != NULL); /* requested but empty, which differs from not requested */
    how.capacity = &most;
    how.weights = NULL;
    CHECK_INT(cf_steps_capacity(plan, NULL, &most, NULL), CF_OK);
    CHECK_INT(cf_metadata_fill(plan, 1, &how, memory, MEMORY_BYTES, &m, NULL), CF_OK);
    CHECK(m.rows == 3 && m.tokens == 0 && m.cu_seqlens_q[1] == 3 && m.sequence_ids[2] == -1);
    cf_plan_free(plan);
}

/* Keys and positions have 32 bits. This finds the first chunk that does not fit. */
TEST(limits_of_32_bits) {
    const int64_t size = 1 << 30;
    const int64_t lengths[] = {2 * ((int64_t)1 << 30) + 5}, pair[] = {size, size};
    cf_plan *plan = NULL;
    cf_metadata m;
    cf_error error;
    stack_memory room;
    void *const memory = aligned(&room);
    size_t bytes;
    REQUIRE((plan = naive_pack(lengths, 1, size)) != NULL);
    CHECK_INT(plan->n_chunks, 3);
    if (sizeof(size_t) > 4) {
        CHECK_INT(cf_metadata_size(plan, 0, NULL, &bytes, &error), CF_OK);
        CHECK_INT(bytes, (2 * 2 + 3 * size) * 4);
        CHECK_INT(cf_metadata_size(plan, -1, NULL, &bytes, &error), CF_ERROR_LIMIT);
    } else { /* not even the first chunk fits into memory */
        CHECK_INT(cf_metadata_size(plan, 0, NULL, &bytes, &error), CF_ERROR_OVERFLOW);
    }
    harness_poison(&m, sizeof m);
    harness_poison(memory, MEMORY_BYTES);
    CHECK_INT(cf_metadata_fill(plan, 1, NULL, memory, MEMORY_BYTES, &m, &error), CF_ERROR_LIMIT); /* 2^31 keys */
    CHECK_INT(error.code, CF_ERROR_LIMIT);
    CHECK_INT(error.got, 2 * size);
    CHECK_INT(error.wanted, INT32_MAX);
    CHECK_INT(cf_metadata_fill(plan, 2, NULL, memory, MEMORY_BYTES, &m, &error), CF_ERROR_LIMIT);
    CHECK_POISON(&m, sizeof m);
    CHECK_POISON(memory, MEMORY_BYTES);
    cf_plan_free(plan);
    REQUIRE((plan = naive_pack(pair, 2, size)) != NULL); /* 2^31 targets in all */
    CHECK_INT(cf_token_rows_size(plan, NULL, &bytes, &error), sizeof(size_t) > 4 ? CF_ERROR_LIMIT : CF_ERROR_OVERFLOW);
    if (sizeof(size_t) > 4) CHECK_STR(error.field, "targets");
    cf_plan_free(plan);
}

/* INT32_MAX keys in all: the largest that is allowed. */
TEST(exactly_32_bits_are_enough) {
    const int64_t lengths[] = {(int64_t)INT32_MAX, (int64_t)INT32_MAX + 1};
    int64_t i;
    for (i = 0; i < 2; i++) {
        cf_pack_desc desc = {0};
        cf_plan *plan = NULL;
        cf_metadata m;
        stack_memory room;
        void *const memory = aligned(&room);
        int64_t last;
        desc.chunk_size = INT32_MAX / 7; /* INT32_MAX = 7 x 306783378 + 1 */
        REQUIRE(cf_pack(&lengths[i], 1, &desc, &plan, NULL) == CF_OK);
        last = plan->n_chunks - 1;
        CHECK_INT(plan->chunks[last].tokens, i + 1);
        CHECK_INT(cf_metadata_fill(plan, last, NULL, memory, MEMORY_BYTES, &m, NULL), i == 0 ? CF_OK : CF_ERROR_LIMIT);
        if (i == 0) CHECK(m.cu_seqlens_k[1] == INT32_MAX && m.position_ids[0] == INT32_MAX - 1);
        cf_plan_free(plan);
    }
}

/* The last row of chunk 2^15 - 1 has the largest position that a target can follow. Nothing may step past it. */
TEST(the_last_position_of_32_bits) {
    const int64_t lengths[] = {2149580799}, chunk = 32767; /* 32,800 even chunks, of which 32,768 have 2^31 - 1 rows */
    cf_pack_desc desc = {0};
    cf_plan *plan = NULL;
    cf_metadata m;
    size_t bytes;
    void *memory;
    desc.chunk_size = 65536;
    desc.split = CF_SPLIT_EVEN;
    REQUIRE(cf_pack(lengths, 1, &desc, &plan, NULL) == CF_OK);
    REQUIRE(plan->chunks[chunk].prefix + plan->chunks[chunk].rows == INT32_MAX);
    CHECK_INT(cf_metadata_size(plan, chunk, NULL, &bytes, NULL), CF_OK);
    memory = malloc(bytes);
    if (CHECK(memory != NULL)) {
        CHECK_INT(cf_metadata_fill(plan, chunk, NULL, memory, bytes, &m, NULL), CF_OK);
        CHECK_INT(m.position_ids[m.rows - 1], INT32_MAX - 1);
        CHECK_INT(m.target_positions[m.rows - 1], INT32_MAX);
    }
    free(memory);
    cf_plan_free(plan);
}

/* ---- the loss ---- */

#define MOST_TOKENS 4000

/* A batch with a mask and prompts, and its mean loss computed plainly. */
typedef struct loss_batch {
    const oracle_batch *batch;
    unsigned char bytes[MOST_TOKENS];
    const unsigned char *ignored[ORACLE_MOST_SEQUENCES];
    int64_t prompts[ORACLE_MOST_SEQUENCES];
    double weights[ORACLE_MOST_SEQUENCES];
    cf_loss_weights_desc how;
    cf_metadata_desc desc;
    cf_capacity most;
    void *memory;
    size_t n_bytes;
    /* found by the passes */
    double sum;
    int64_t n_targets, n_odd; /* targets; rows without a target but with a weight, or with another target */
} loss_batch;

/* Returns some loss for one target. */
static double loss_of(int64_t sequence, int64_t position) {
    harness_rng rng = {(uint64_t)(sequence * 100000 + position)};
    return harness_unit(&rng);
}

static int is_target(const loss_batch *b, int64_t sequence, int64_t position) {
    if (position < !b->how.shifted || position >= b->batch->lengths[sequence]) return 0;
    return b->how.ignored == NULL || b->ignored[sequence] == NULL || !b->ignored[sequence][position];
}

/* Returns the mean loss over the targets of the sequences whose prompt is `prompt`; NaN if there is no target. */
static double mean_of_prompt(const loss_batch *b, int64_t prompt) {
    double sum = 0;
    int64_t i, t, n = 0;
    for (i = 0; i < b->batch->n; i++)
        for (t = 0; t < b->batch->lengths[i] && b->prompts[i] == prompt; t++)
            if (is_target(b, i, t)) sum += loss_of(i, t), n++;
    return sum / (double)n;
}

/* Computes each mean by its definition, sequence by sequence. The mean over all tokens treats them as one prompt; the
   mean over sequences treats each as its own prompt. */
static double plain_mean(loss_batch *b) {
    int64_t i, n = 0, kept[ORACLE_MOST_SEQUENCES];
    double sum = 0;
    memcpy(kept, b->prompts, sizeof kept);
    for (i = 0; i < b->batch->n; i++) {
        if (b->how.mean <= CF_MEAN_TOKENS) b->prompts[i] = 0;
        if (b->how.mean == CF_MEAN_SEQUENCES) b->prompts[i] = i;
    }
    for (i = 0; i < b->batch->n; i++) {
        double mean = mean_of_prompt(b, i);
        if (mean == mean) sum += mean, n++;
    }
    memcpy(b->prompts, kept, sizeof kept);
    return n > 0 ? sum / (double)n : 0;
}

static void count_loss(loss_batch *b, const cf_plan *plan, const cf_step *step) {
    cf_metadata m;
    int64_t row;
    if (!step->wants_loss) return;
    REQUIRE(cf_metadata_fill(plan, step->action.chunk, &b->desc, b->memory, b->n_bytes, &m, NULL) == CF_OK);
    for (row = 0; row < m.rows; row++) {
        if (m.target_positions[row] < 0) {
            b->n_odd += m.loss_weights[row] != 0;
            continue;
        }
        b->n_targets++;
        b->n_odd += m.target_positions[row] - m.position_ids[row] != !b->how.shifted;
        b->sum += m.loss_weights[row] * loss_of(m.sequence_ids[row], m.target_positions[row]);
    }
}

/* Draws a mask, prompts and a mean. Returns 0 if the batch is too large for the arrays. */
static int draw_loss(harness_rng *rng, const oracle_batch *batch, loss_batch *b) {
    int64_t i, t, used = 0;
    int masked = harness_chance(rng, 0.6);
    b->batch = batch;
    memset(&b->how, 0, sizeof b->how);
    for (i = 0; i < batch->n; i++) {
        double share = harness_chance(rng, 0.2) ? 1 : harness_unit(rng);
        if (used + batch->lengths[i] > MOST_TOKENS) return 0;
        b->ignored[i] = harness_chance(rng, 0.2) ? NULL : b->bytes + used;
        for (t = 0; t < batch->lengths[i]; t++) b->bytes[used + t] = harness_chance(rng, share) ? 7 : 0;
        b->prompts[i] = harness_between(rng, 0, harness_chance(rng, 0.5) ? batch->n - 1 : (batch->n - 1) / 3);
        used += batch->lengths[i];
    }
    b->how.mean = (cf_mean)harness_between(rng, CF_MEAN_DEFAULT, CF_MEAN_PROMPTS);
    b->how.ignored = masked ? b->ignored : NULL;
    if (b->how.mean == CF_MEAN_PROMPTS) b->how.prompts = b->prompts;
    b->how.shifted = harness_chance(rng, 0.3);
    return 1;
}

/* Runs a schedule of any kind for one rank, stage by stage. */
static void run_loss(harness_rng *rng, const cf_plan *plan, int64_t rank, loss_batch *b) {
    cf_schedule_desc order = {0};
    cf_schedule *schedule = NULL, *lowered = NULL;
    int64_t stage, i;
    order.shape.rank = rank;
    order.shape.k = harness_between(rng, 1, 3);
    order.kind = (cf_schedule_kind)harness_between(rng, CF_SCHEDULE_PAPER, CF_SCHEDULE_ZERO_BUBBLE);
    if (harness_chance(rng, 0.004)) order.kind = CF_SCHEDULE_BEST;
    if (harness_chance(rng, 0.5) && order.kind == CF_SCHEDULE_PAPER) order.shape.replay = CF_REPLAY_PIPELINE;
    order.shape.n_stages = order.kind == CF_SCHEDULE_INTERLEAVED ? 2 : harness_between(rng, 1, 3);
    REQUIRE(cf_schedule_make(plan, &order, &schedule, NULL) == CF_OK);
    REQUIRE(cf_schedule_lower(plan, schedule, NULL, &lowered, NULL) == CF_OK);
    for (stage = 0; stage < order.shape.n_stages; stage++) {
        cf_steps *steps = NULL;
        REQUIRE(cf_steps_make(plan, lowered, stage, 0, NULL, &steps, NULL) == CF_OK);
        for (i = 0; i < steps->n; i++) count_loss(b, plan, &steps->steps[i]);
        cf_steps_free(steps);
    }
    cf_schedule_free(lowered);
    cf_schedule_free(schedule);
}

/* However a batch is packed, split, distributed over ranks and scheduled, the weighted losses add up to the mean. */
TEST(ten_thousand_ways_to_run_a_batch_have_the_same_loss) {
    static oracle_batch batch;
    static loss_batch b;
    int64_t done = 0, i, t, rank, wanted;
    uint64_t seed;
    for (seed = 41000000; done < harness_rounds(10000, 1000); seed++) {
        harness_rng rng = {seed};
        cf_plan *plan = NULL;
        double mean;
        oracle_draw(&rng, &batch, 10);
        if (batch.desc.chunk_size > 64 || !draw_loss(&rng, &batch, &b)) continue;
        oracle_note(seed, &batch);
        REQUIRE(cf_loss_weights(batch.lengths, batch.n, &b.how, b.weights, NULL) == CF_OK);
        REQUIRE(cf_pack(batch.lengths, batch.n, &batch.desc, &plan, NULL) == CF_OK);
        b.most = some_capacity(&rng, plan);
        b.desc.capacity = harness_chance(&rng, 0.3) ? &b.most : NULL;
        b.desc.ignored = b.how.ignored;
        b.desc.weights = b.weights;
        b.desc.shifted = b.how.shifted;
        REQUIRE(cf_metadata_size(plan, -1, &b.desc, &b.n_bytes, NULL) == CF_OK);
        b.memory = malloc(b.n_bytes + 1);
        b.sum = 0;
        b.n_targets = b.n_odd = wanted = 0;
        for (rank = 0; rank < plan->n_ranks; rank++) run_loss(&rng, plan, rank, &b);
        for (i = 0; i < batch.n; i++)
            for (t = 0; t < batch.lengths[i]; t++) wanted += is_target(&b, i, t);
        mean = plain_mean(&b);
        CHECK_INT(b.n_targets, wanted);
        CHECK_INT(b.n_odd, 0);
        CHECK(fabs(b.sum - mean) <= 1e-13 * mean);
        free(b.memory);
        cf_plan_free(plan);
        done++;
    }
}

/* Batches from practice: empty sequences between others, a rank with one short sequence or without targets, no target
   at all, and a rollout that is the beginning of another, with an exact copy and weights of both signs. Every target is
   in one row of one rank; a shared target has the sum of its weights. */
TEST(batches_that_people_tried) {
    static unsigned char none[300];
    const unsigned char *const no_target[] = {none, none, none, none};
    const unsigned char *const second_none[] = {NULL, none, NULL, NULL};
    static const cf_shared_prefix rollouts[] = {{0, 0}, {0, 60}, {0, 90}, {0, 0}};
    static const double signs[] = {1, -2, 0.5, 0.25};
    const struct {
        int64_t n, lengths[4], n_ranks;
        int lockstep;
        const unsigned char *const *ignored;
        const cf_shared_prefix *shares;
        double wanted; /* sum of the weights of all targets */
    } cases[] = {{4, {40, 0, 3, 0}, 1, 0, NULL, NULL, 1},
                 {4, {40, 0, 3, 0}, 2, 1, NULL, NULL, 1},
                 {2, {300, 3}, 2, 0, NULL, NULL, 1},
                 {2, {300, 3}, 2, 1, NULL, NULL, 1},
                 {2, {300, 3}, 2, 1, second_none, NULL, 1},
                 {1, {5}, 2, 1, NULL, NULL, 1},
                 {4, {40, 0, 3, 0}, 2, 1, no_target, NULL, 0},
                 {4, {90, 60, 90, 7}, 1, 0, NULL, rollouts, 89 * 1.0 + 59 * -2.0 + 89 * 0.5 + 6 * 0.25}};
    int64_t i, chunk, row;
    memset(none, 1, sizeof none);
    for (i = 0; i < (int64_t)(sizeof cases / sizeof cases[0]); i++) {
        cf_pack_desc pack = {.chunk_size = 32, .min_shared_prefix = cases[i].shares != NULL};
        cf_loss_weights_desc how = {0};
        cf_metadata_desc desc = {0};
        cf_plan *plan = NULL;
        double weights[4], sum = 0;
        size_t bytes = 0;
        void *memory;
        harness_note("case %d", (int)i);
        pack.n_ranks = cases[i].n_ranks;
        pack.lockstep = cases[i].lockstep;
        pack.shared_prefixes = cases[i].shares;
        how.ignored = desc.ignored = cases[i].ignored;
        REQUIRE(cf_loss_weights(cases[i].lengths, cases[i].n, &how, weights, NULL) == CF_OK);
        desc.weights = cases[i].shares != NULL ? signs : weights;
        REQUIRE(cf_pack(cases[i].lengths, cases[i].n, &pack, &plan, NULL) == CF_OK);
        CHECK_INT(cf_plan_validate(plan, cases[i].lengths, cases[i].n, NULL, NULL), CF_OK);
        REQUIRE(cf_metadata_size(plan, -1, &desc, &bytes, NULL) == CF_OK);
        REQUIRE((memory = malloc(bytes + 1)) != NULL);
        for (chunk = 0; chunk < plan->n_chunks; chunk++) {
            cf_metadata m;
            REQUIRE(cf_metadata_fill(plan, chunk, &desc, memory, bytes, &m, NULL) == CF_OK);
            for (row = 0; row < m.rows; row++) sum += m.loss_weights[row];
            for (row = 0; row < m.n_extra; row++) sum += m.extra_weights[row];
        }
        CHECK(fabs(sum - cases[i].wanted) <= 1e-12);
        free(memory);
        cf_plan_free(plan);
    }
}

TEST(weights_by_hand) {
    const int64_t lengths[] = {4, 1, 0, 3, 6}, prompts[] = {1, 1, 4, 1, 0};
    const unsigned char none[6] = {0, 1, 1, 1, 1, 1};
    const unsigned char *const ignored[] = {NULL, NULL, NULL, NULL, none};
    const double by_token[] = {0.1, 0.1, 0.1, 0.1, 0.1}, by_sequence[] = {1.0 / 9, 0, 0, 1.0 / 6, 1.0 / 15};
    const double by_prompt[] = {0.2, 0.2, 0, 0.2, 0};
    cf_loss_weights_desc how = {0};
    double weights[5];
    CHECK_INT(cf_loss_weights(lengths, 5, NULL, weights, NULL), CF_OK);
    CHECK(memcmp(weights, by_token, sizeof weights) == 0);
    how.mean = CF_MEAN_SEQUENCES;
    CHECK_INT(cf_loss_weights(lengths, 5, &how, weights, NULL), CF_OK);
    CHECK(memcmp(weights, by_sequence, sizeof weights) == 0);
    how.mean = CF_MEAN_PROMPTS;
    how.prompts = prompts;
    how.ignored = ignored;
    CHECK_INT(cf_loss_weights(lengths, 5, &how, weights, NULL), CF_OK);
    CHECK(memcmp(weights, by_prompt, sizeof weights) == 0); /* prompt 0 loses its only targets */
    CHECK_INT(cf_loss_weights(NULL, 0, NULL, NULL, NULL), CF_OK);
}

TEST(loss_weights_refuse_bad_arguments) {
    const int64_t lengths[] = {4, 7}, prompts[] = {1, 2}, below[] = {1, -1}, negative[] = {3, -1};
    const int64_t large[] = {INT64_MAX, 1};
    harness_heap heap = {0};
    cf_allocator failing = {harness_alloc, harness_release, NULL};
    cf_loss_weights_desc how;
    double weights[2];
    cf_error error;
    failing.user = &heap;
    heap.fail_at = 1;
    memset(&how, 0, sizeof how);
    harness_poison(weights, sizeof weights);
    CHECK_INT(cf_loss_weights(lengths, -1, &how, weights, &error), CF_ERROR_ARGUMENT);
    CHECK_STR(error.field, "n");
    CHECK_INT(cf_loss_weights(lengths, (int64_t)1 << 40, &how, weights, &error), CF_ERROR_LIMIT);
    CHECK_INT(cf_loss_weights(NULL, 2, &how, weights, &error), CF_ERROR_ARGUMENT);
    CHECK_STR(error.field, "lengths");
    CHECK_INT(cf_loss_weights(lengths, 2, &how, NULL, &error), CF_ERROR_ARGUMENT);
    CHECK_STR(error.field, "weights");
    CHECK_INT(cf_loss_weights(negative, 2, &how, weights, &error), CF_ERROR_ARGUMENT);
    CHECK(strcmp(error.field, "lengths") == 0 && error.item == 1 && error.got == -1);
    CHECK_INT(cf_loss_weights(large, 2, &how, weights, &error), CF_ERROR_OVERFLOW);
    how.mean = CF_MEAN_COUNT;
    CHECK_INT(cf_loss_weights(lengths, 2, &how, weights, &error), CF_ERROR_ARGUMENT);
    CHECK_STR(error.field, "mean");
    how.mean = CF_MEAN_PROMPTS;
    CHECK_INT(cf_loss_weights(lengths, 2, &how, weights, &error), CF_ERROR_ARGUMENT);
    CHECK_STR(error.field, "prompts");
    how.prompts = prompts;
    CHECK_INT(cf_loss_weights(lengths, 2, &how, weights, &error), CF_ERROR_ARGUMENT);
    CHECK(strcmp(error.field, "prompts") == 0 && error.item == 1 && error.got == 2 && error.wanted == 1);
    how.prompts = below;
    CHECK_INT(cf_loss_weights(lengths, 2, &how, weights, &error), CF_ERROR_ARGUMENT);
    CHECK(strcmp(error.field, "prompts") == 0 && error.item == 1 && error.got == -1 && error.wanted == 0);
    how.mean = CF_MEAN_TOKENS;
    CHECK_INT(cf_loss_weights(lengths, 2, &how, weights, &error), CF_ERROR_ARGUMENT);
    CHECK(strcmp(error.field, "prompts") == 0 && error.item == -1 && strstr(error.text, "CF_MEAN_PROMPTS") != NULL);
    how.prompts = NULL;
    how.allocator = &failing;
    CHECK_INT(cf_loss_weights(lengths, 2, &how, weights, &error), CF_ERROR_MEMORY);
    failing.release = NULL;
    CHECK_INT(cf_loss_weights(lengths, 2, &how, weights, &error), CF_ERROR_ARGUMENT);
    CHECK_POISON(weights, sizeof weights);
}

/* ---- arguments ---- */

TEST(metadata_refuses_bad_arguments) {
    const int64_t lengths[] = {10, 2};
    const int64_t bad_chunks[] = {-1, -2, 3, 4, INT64_MAX, INT64_MIN};
    cf_plan *plan = NULL;
    cf_metadata m;
    cf_error error;
    stack_memory room;
    void *const memory = aligned(&room);
    size_t bytes;
    int64_t i;
    REQUIRE((plan = naive_pack(lengths, 2, 4)) != NULL);
    harness_poison(&m, sizeof m);
    harness_poison(memory, MEMORY_BYTES);
    harness_poison(&bytes, sizeof bytes);
    for (i = 0; i < COUNT(bad_chunks); i++) {
        harness_note("chunk %lld", (long long)bad_chunks[i]);
        CHECK_INT(cf_metadata_fill(plan, bad_chunks[i], NULL, memory, MEMORY_BYTES, &m, &error), CF_ERROR_ARGUMENT);
        CHECK_STR(error.field, "chunk");
        CHECK_INT(error.got, bad_chunks[i]);
        if (bad_chunks[i] == -1) continue; /* the size does not depend on the chunk's number */
        CHECK_INT(cf_metadata_size(plan, bad_chunks[i], NULL, &bytes, &error), CF_ERROR_ARGUMENT);
        CHECK_STR(error.field, "chunk");
        CHECK_INT(cf_metadata_size(plan, bad_chunks[i], NULL, &bytes, NULL), CF_ERROR_ARGUMENT);
    }
    harness_note("%s", "");
    CHECK_INT(cf_metadata_size(NULL, 0, NULL, &bytes, &error), CF_ERROR_ARGUMENT);
    CHECK_STR(error.field, "plan");
    CHECK_INT(cf_metadata_size(plan, 0, NULL, NULL, &error), CF_ERROR_ARGUMENT);
    CHECK_STR(error.field, "bytes");
    CHECK_INT(cf_metadata_fill(NULL, 0, NULL, memory, MEMORY_BYTES, &m, &error), CF_ERROR_ARGUMENT);
    CHECK_STR(error.field, "plan");
    CHECK_INT(cf_metadata_fill(plan, 0, NULL, NULL, MEMORY_BYTES, &m, &error), CF_ERROR_ARGUMENT);
    CHECK_STR(error.field, "memory");
    CHECK_INT(cf_metadata_fill(plan, 0, NULL, memory, MEMORY_BYTES, NULL, &error), CF_ERROR_ARGUMENT);
    CHECK_STR(error.field, "out");
    CHECK_INT(cf_metadata_fill(plan, 0, NULL, (char *)memory + 8, MEMORY_BYTES - 16, &m, &error), CF_ERROR_SPACE);
    CHECK_STR(error.field, "memory");
    CHECK_POISON(&m, sizeof m);
    CHECK_POISON(memory, MEMORY_BYTES);
    CHECK_POISON(&bytes, sizeof bytes);
    cf_plan_free(plan);
}

/* Every function that takes a pointer survives NULL. */
TEST(questions_without_a_plan_have_answers) {
    const unsigned char zero[sizeof(cf_plan_stats)] = {0};
    cf_plan_stats stats;
    harness_poison(&stats, sizeof stats);
    cf_plan_measure(NULL, NULL, &stats);
    CHECK(memcmp(&stats, zero, sizeof stats) == 0);
    cf_plan_measure(NULL, NULL, NULL);
    CHECK(cf_cost_seconds(NULL, 1, 1) == 0);
    CHECK_INT(cf_pack_defaults(NULL).n_ranks, 1);
    CHECK_INT(cf_schedule_defaults(NULL).shape.k, 1);
    CHECK_INT(cf_parallel_defaults(NULL).tp, 1);
    CHECK_INT(cf_memory_defaults(NULL).parallel.tp, 1);
}

/* ---- tokens of all chunks ---- */

#define MOST_BATCH_ROWS 20000

static uint16_t short_tokens[MOST_TOKENS];
static int32_t long_tokens[MOST_TOKENS];

/* Returns some token, the same in both widths. */
static int32_t token_of(int64_t sequence, int64_t position) {
    return (int32_t)((sequence * 4099 + position * 13) % 65536);
}

/* Lays out the tokens of a batch in both widths. Returns 0 if there are too many. */
static int make_tokens(const oracle_batch *batch, const void **in_2, const void **in_4) {
    int64_t i, t, used = 0;
    for (i = 0; i < batch->n; i++) {
        in_2[i] = short_tokens + used;
        in_4[i] = long_tokens + used;
        if (used + batch->lengths[i] > MOST_TOKENS) return 0;
        for (t = 0; t < batch->lengths[i]; t++, used++) {
            long_tokens[used] = token_of(i, t);
            short_tokens[used] = (uint16_t)token_of(i, t);
        }
    }
    return 1;
}

/* Writes the expected rows of a plan without shares, slice by slice. */
static void expect_rows(const loss_batch *b, const cf_plan *plan, const cf_token_rows *rows, int32_t *targets) {
    static int32_t sequences[MOST_BATCH_ROWS], positions[MOST_BATCH_ROWS];
    int64_t i, t, row, n_targets = 0;
    for (row = 0; row < rows->n_rows; row++) sequences[row] = -1;
    for (i = 0; i < plan->n_chunks; i++) {
        const cf_chunk *c = &plan->chunks[i];
        CHECK_INT(rows->first_row[i + 1] - rows->first_row[i], b->desc.capacity != NULL ? b->most.rows : c->rows);
        for (t = c->first_slice; t < c->first_slice + c->n_slices; t++) {
            const cf_slice *s = &plan->slices[t];
            for (row = 0; row < s->length; row++) {
                sequences[rows->first_row[i] + s->offset + row] = s->sequence;
                positions[rows->first_row[i] + s->offset + row] = (int32_t)(s->begin + row);
            }
        }
    }
    for (row = 0; row < rows->n_rows; row++) {
        int64_t at = sequences[row], next = positions[row] + !b->how.shifted;
        int wanted = at >= 0 && is_target(b, at, next);
        CHECK_INT(rows->tokens[row], at < 0 ? -1 : token_of(at, positions[row]));
        CHECK_INT(rows->first_target[row + 1] - rows->first_target[row], wanted);
        if (!wanted) continue;
        CHECK(rows->weights == NULL || rows->weights[n_targets] == (float)b->weights[at]);
        targets[n_targets++] = token_of(at, next);
    }
    CHECK_INT(rows->n_targets, n_targets);
    CHECK(memcmp(targets, rows->targets, (size_t)n_targets * sizeof *targets) == 0);
}

TEST(tokens_of_all_chunks) {
    static oracle_batch batch;
    static loss_batch b;
    static int32_t targets[MOST_BATCH_ROWS];
    int64_t done = 0;
    uint64_t seed;
    for (seed = 47000000; done < harness_rounds(400, 60); seed++) {
        harness_rng rng = {seed};
        const void *in_2[ORACLE_MOST_SEQUENCES], *in_4[ORACLE_MOST_SEQUENCES];
        cf_plan *plan = NULL;
        size_t bytes = 0;
        int wide;
        oracle_draw(&rng, &batch, 10);
        if (batch.desc.chunk_size > 64 || !draw_loss(&rng, &batch, &b) || !make_tokens(&batch, in_2, in_4)) continue;
        oracle_note(seed, &batch);
        memset(&b.desc, 0, sizeof b.desc);
        REQUIRE(cf_loss_weights(batch.lengths, batch.n, &b.how, b.weights, NULL) == CF_OK);
        REQUIRE(cf_pack(batch.lengths, batch.n, &batch.desc, &plan, NULL) == CF_OK);
        b.desc.ignored = b.how.ignored;
        b.desc.weights = seed % 3 == 0 ? NULL : b.weights;
        b.desc.shifted = b.how.shifted;
        b.most = some_capacity(&rng, plan);
        b.desc.capacity = seed % 4 == 0 ? &b.most : NULL;
        REQUIRE(cf_token_rows_size(plan, &b.desc, &bytes, NULL) == CF_OK);
        for (wide = 0; wide < 2; wide++) {
            void *memory = harness_guard_new(bytes);
            cf_token_rows rows;
            cf_error error;
            harness_poison(&rows, sizeof rows);
            CHECK_INT(cf_token_rows_fill(plan, &b.desc, in_2, 2, memory, bytes - 1, &rows, &error), CF_ERROR_SPACE);
            CHECK_POISON(&rows, sizeof rows);
            CHECK_POISON(memory, bytes);
            CHECK_INT(cf_token_rows_fill(plan, &b.desc, wide ? in_4 : in_2, wide ? 4 : 2, memory, bytes, &rows, NULL),
                      CF_OK);
            CHECK_INT(rows.first_row[plan->n_chunks], rows.n_rows);
            CHECK((rows.weights != NULL) == (b.desc.weights != NULL));
            if (rows.n_rows <= MOST_BATCH_ROWS) expect_rows(&b, plan, &rows, targets);
            harness_guard_free(memory);
        }
        cf_plan_free(plan);
        done++;
    }
}

/* Weights that are NaN, or too large for the type of the result, are refused by sequence, and nothing is written. The
   first chunk has all three sequences. */
static void expect_refused_weights(const cf_plan *plan, const cf_metadata_desc *given, const void *const *tokens,
                                   void *place, size_t bytes) {
    static const double bad[] = {NAN, INFINITY, -INFINITY, 1e300};
    cf_metadata_desc desc = *given;
    size_t i;
    for (i = 0; i < COUNT(bad); i++) {
        double weights[] = {1, -2, bad[i]};
        cf_metadata metadata;
        cf_token_rows rows;
        cf_error error;
        cf_result wanted = bad[i] == 1e300 ? CF_OK : CF_ERROR_ARGUMENT;
        desc.weights = weights;
        harness_poison(&rows, sizeof rows);
        harness_poison(&metadata, sizeof metadata);
        CHECK_INT(cf_token_rows_fill(plan, &desc, tokens, 4, place, bytes, &rows, &error), CF_ERROR_ARGUMENT);
        CHECK_STR(error.field, "weights");
        CHECK_INT(error.item, 2);
        CHECK_POISON(&rows, sizeof rows);
        CHECK_INT(cf_metadata_fill(plan, 0, &desc, place, bytes, &metadata, &error), wanted);
        if (wanted == CF_OK) continue;
        CHECK_STR(error.field, "weights");
        CHECK_INT(error.item, 2);
        CHECK_POISON(&metadata, sizeof metadata);
    }
}

/* Three rollouts of a prompt of three tokens. Two answers follow the prompt's last token, so its row has three
   targets. */
TEST(tokens_where_sequences_part) {
    static const int32_t a[] = {1, 2, 3, 10, 11}, c[] = {1, 2, 3, 20}, d[] = {1, 2, 3, 30, 31, 32};
    const void *tokens[] = {a, c, d};
    static const int64_t lengths[] = {5, 4, 6};
    static const cf_shared_prefix shares[] = {{0, 0}, {0, 3}, {0, 3}};
    static const double weights[] = {1, 2, 4};
    static unsigned char memory[4096];
    const cf_pack_desc pack = {.chunk_size = 16, .min_shared_prefix = 1, .shared_prefixes = shares};
    cf_metadata_desc desc = {.weights = weights};
    cf_plan *plan = NULL;
    cf_token_rows rows;
    cf_error error;
    int64_t row, t, seen = 0;
    double sum = 0;
    void *place = (void *)(((uintptr_t)memory + CF_MEMORY_ALIGNMENT - 1) / CF_MEMORY_ALIGNMENT * CF_MEMORY_ALIGNMENT);
    REQUIRE(cf_pack(lengths, 3, &pack, &plan, NULL) == CF_OK);
    REQUIRE(cf_token_rows_fill(plan, &desc, tokens, 4, place, 3072, &rows, NULL) == CF_OK);
    /* the prompt's, those where the sequences diverge, and the answers' own */
    CHECK_INT(rows.n_targets, 2 + 3 + 6 - 3);
    for (row = 0; row < rows.n_rows; row++) {
        CHECK_INT(rows.first_target[row + 1] - rows.first_target[row] == 3, rows.tokens[row] == 3);
        for (t = rows.first_target[row]; t < rows.first_target[row + 1]; t++) {
            sum += (double)rows.weights[t];
            if (rows.tokens[row] == 3) seen += rows.targets[t];
            else CHECK_INT(rows.targets[t], rows.tokens[row] + 1);
        }
    }
    CHECK_INT(seen, 10 + 20 + 30);
    CHECK(sum == 4.0 * 1 + 3.0 * 2 + 5.0 * 4);
    CHECK_INT(cf_token_rows_fill(plan, &desc, tokens, 3, place, 3072, &rows, &error), CF_ERROR_ARGUMENT);
    CHECK_STR(error.field, "token_bytes");
    expect_refused_weights(plan, &desc, tokens, place, 3072);
    tokens[1] = NULL;
    CHECK_INT(cf_token_rows_fill(plan, &desc, tokens, 4, place, 3072, &rows, &error), CF_ERROR_ARGUMENT);
    CHECK_STR(error.field, "tokens");
    CHECK_INT(error.item, 1);
    CHECK_INT(cf_token_rows_fill(plan, &desc, NULL, 4, place, 3072, &rows, &error), CF_ERROR_ARGUMENT);
    CHECK_INT(cf_token_rows_fill(plan, &desc, tokens, 4, place, 3072, NULL, &error), CF_ERROR_ARGUMENT);
    CHECK_INT(cf_token_rows_size(plan, &desc, NULL, &error), CF_ERROR_ARGUMENT);
    CHECK_INT(cf_token_rows_size(NULL, &desc, (size_t *)(void *)memory, &error), CF_ERROR_ARGUMENT);
    cf_plan_free(plan);
}

SUITE(metadata, CASE(masks_rows_and_sizes_of_random_plans),
      CASE(a_varlen_kernel_sees_what_it_should_for_every_alignment), CASE(a_capacity_that_is_too_small_is_refused),
      CASE(a_capacity_up_to_32_bits), CASE(a_hybrid_chunk_by_hand), CASE(padding_by_hand),
      CASE(an_idle_chunk_has_empty_metadata), CASE(limits_of_32_bits), CASE(exactly_32_bits_are_enough),
      CASE(the_last_position_of_32_bits), CASE(ten_thousand_ways_to_run_a_batch_have_the_same_loss),
      CASE(weights_by_hand), CASE(batches_that_people_tried), CASE(loss_weights_refuse_bad_arguments),
      CASE(metadata_refuses_bad_arguments),
      CASE(questions_without_a_plan_have_answers), CASE(tokens_of_all_chunks), CASE(tokens_where_sequences_part));
