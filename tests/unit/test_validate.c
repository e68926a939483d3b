/* Tests >>plan: cf_plan_validate, on damaged plans. Every test that makes a plan checks that it accepts sound ones. */

#include "chunkflow.h"
#include "../harness.h"
#include "../reference/oracle.h"

#include <stdlib.h>
#include <string.h>

/* Copies an array of a plan that may be damaged. Every array is a separate allocation with one zeroed item to spare, so
   that a count may be raised by one and reads past that are seen. */
static void *copy_array(const void *from, int64_t count, size_t bytes) {
    char *copy = (char *)calloc((size_t)count + 1, bytes);
    if (copy && count > 0) memcpy(copy, from, (size_t)count * bytes);
    return copy;
}

static cf_plan copy_plan(const cf_plan *plan) {
    cf_plan copy = *plan;
    memset(&copy.block, 0, sizeof copy.block);
    copy.chunks = (cf_chunk *)copy_array(plan->chunks, plan->n_chunks, sizeof *plan->chunks);
    copy.slices = (cf_slice *)copy_array(plan->slices, plan->n_slices, sizeof *plan->slices);
    copy.chains = (cf_chain *)copy_array(plan->chains, plan->n_chains, sizeof *plan->chains);
    CHECK(copy.chunks && copy.slices && copy.chains);
    return copy;
}

static void drop_copy(cf_plan *copy) {
    free(copy->chunks);
    free(copy->slices);
    free(copy->chains);
}

/* ---- one known plan: each kind of damage is named ---- */

/* The plan has 2 ranks x 4 chunks, found below.

   - rank 0: sequence 0 in chunks 0 .. 2 (16, 16, 8 tokens; chunk 2 is hybrid), chunk 3 standalone
   - rank 1: sequence 5 in chunks 4, 5 (hybrid), chunk 6 standalone, chunk 7 idle */
static const int64_t known_lengths[] = {40, 5, 3, 16, 0, 21, 7};
#define N_KNOWN ((int64_t)(sizeof known_lengths / sizeof known_lengths[0]))

static const cf_slice known_slices[] = {
    /* begin, sequence, length, offset, up, first, n */
    {0, 0, 16, 0, -1, 0, 1}, {16, 0, 16, 0, 0, 0, 1}, {32, 0, 8, 0, 1, 0, 1},
    {0, 6, 7, 8, -1, 6, 1},  {0, 3, 16, 0, -1, 3, 1}, {0, 5, 16, 0, -1, 5, 1},
    {16, 5, 5, 0, 5, 5, 1},  {0, 1, 5, 8, -1, 1, 1},  {0, 2, 3, 0, -1, 2, 1},
};
static const cf_chunk known_chunks[] = {
    /* first_slice, n_slices, tokens, padded, pairs, chain, index, prefix, rank, up, down, below, state, cp */
    {0, 1, 16, 16, 136, 0, 0, 0, 0, -1, 1, 2, 16, 0}, {1, 1, 16, 16, 392, 0, 1, 16, 0, 0, 2, 1, 16, 0},
    {2, 2, 15, 16, 320, 0, 2, 32, 0, 1, -1, 0, 8, 0}, {4, 1, 16, 16, 136, -1, 0, 0, 0, -1, -1, 0, 0, 0},
    {5, 1, 16, 16, 136, 1, 0, 0, 1, -1, 5, 1, 16, 0}, {6, 2, 10, 16, 110, 1, 1, 16, 1, 4, -1, 0, 5, 0},
    {8, 1, 3, 4, 6, -1, 0, 0, 1, -1, -1, 0, 0, 0},    {9, 0, 0, 0, 0, -1, 0, 0, 1, -1, -1, 0, 0, 0},
};
static const cf_chain known_chains[] = {{0, 0, 3, 40, 0}, {5, 4, 2, 21, 0}}; /* sequence, first_chunk, n_chunks, tokens */

static cf_plan known_plan(void) {
    cf_plan plan = {0};
    plan.chunk_size = 16;
    plan.align = 4;
    plan.max_slices = 3;
    plan.method = CF_PACK_BEST_FIT;
    plan.split = CF_SPLIT_FULL;
    plan.n_sequences = N_KNOWN;
    plan.n_empty = 1;
    plan.n_tokens = 92;
    plan.n_ranks = 2;
    plan.chunks_per_rank = 4;
    plan.n_chunks = 8;
    plan.n_idle = 1;
    plan.n_chains = 2;
    plan.n_slices = 9;
    plan.lower_bound = 6;
    plan.chunks = (cf_chunk *)(uintptr_t)known_chunks;
    plan.slices = (cf_slice *)(uintptr_t)known_slices;
    plan.chains = (cf_chain *)(uintptr_t)known_chains;
    return copy_plan(&plan);
}

TEST(a_plan_made_by_hand_is_accepted) {
    cf_plan plan = known_plan();
    cf_error error;
    CHECK(oracle_plan_fault(&plan, known_lengths, N_KNOWN) == NULL);
    if (!CHECK_INT(cf_plan_validate(&plan, known_lengths, N_KNOWN, NULL, &error), CF_OK)) FAIL("%s", error.text);
    drop_copy(&plan);
}

typedef enum where { HEADER, CHUNK, SLICE, CHAIN } where;

typedef struct damage {
    where place;
    int64_t index;      /* index of the chunk, slice or chain */
    size_t member;      /* offsetof */
    size_t bytes;       /* of the member */
    int64_t value;
    const char *field;  /* the field that the error must name */
    int64_t item;
    const char *name;   /* of the member */
} damage;

#define MEMBER_OF(record, member) offsetof(record, member), sizeof(((record *)0)->member)
#define IN_PLAN(member, value, field) {HEADER, 0, MEMBER_OF(cf_plan, member), value, field, -1, #member}
#define IN_CHUNK(i, member, value, field, item) {CHUNK, i, MEMBER_OF(cf_chunk, member), value, field, item, #member}
#define IN_SLICE(i, member, value, field, item) {SLICE, i, MEMBER_OF(cf_slice, member), value, field, item, #member}
#define IN_CHAIN(i, member, value, field, item) {CHAIN, i, MEMBER_OF(cf_chain, member), value, field, item, #member}

static const damage damages[] = {
    IN_PLAN(chunk_size, 0, "chunk_size"),
    IN_PLAN(chunk_size, -16, "chunk_size"),
    IN_PLAN(chunk_size, (int64_t)CF_MAX_CHUNK_SIZE + 1, "chunk_size"),
    IN_PLAN(align, 0, "align"),
    IN_PLAN(align, -4, "align"),
    IN_PLAN(align, 17, "align"),
    IN_PLAN(align, 3, "align"),
    IN_PLAN(max_slices, -1, "max_slices"),
    IN_PLAN(n_sequences, 6, "n_sequences"),
    IN_PLAN(n_sequences, 8, "n_sequences"),
    IN_PLAN(n_sequences, INT64_MAX, "n_sequences"),
    IN_PLAN(n_empty, 0, "n_empty"),
    IN_PLAN(n_empty, 2, "n_empty"),
    IN_PLAN(n_tokens, 91, "n_tokens"),
    IN_PLAN(n_tokens, INT64_MIN, "n_tokens"),
    IN_PLAN(n_ranks, 0, "n_ranks"),
    IN_PLAN(n_ranks, 1, "n_chunks"),
    IN_PLAN(n_ranks, INT64_MAX, "n_ranks"),
    IN_PLAN(chunks_per_rank, 3, "n_chunks"),
    IN_PLAN(chunks_per_rank, -4, "chunks_per_rank"),
    IN_PLAN(n_chunks, 7, "n_chunks"),
    IN_PLAN(n_chunks, INT64_MAX, "n_chunks"),
    IN_PLAN(n_idle, 0, "n_idle"),
    IN_PLAN(n_idle, 2, "n_idle"),
    IN_PLAN(n_chains, -1, "n_chains"),
    IN_PLAN(n_chains, INT64_MAX, "n_chains"),
    {HEADER, 0, MEMBER_OF(cf_plan, n_chains), 1, "chunks.chain", 4, NULL},
    {HEADER, 0, MEMBER_OF(cf_plan, n_chains), 3, "chunks.chain", 0, NULL},
    {HEADER, 0, MEMBER_OF(cf_plan, n_slices), 8, "chunks.n_slices", 6, NULL},
    IN_PLAN(n_slices, 10, "n_slices"),
    IN_PLAN(n_slices, -1, "n_slices"),
    IN_PLAN(n_slices, (int64_t)CF_MAX_SLICES + 1, "n_slices"),
    IN_PLAN(lower_bound, -1, "lower_bound"),
    IN_PLAN(lower_bound, 8, "lower_bound"),

    IN_CHUNK(0, first_slice, 1, "chunks.first_slice", 0),
    IN_CHUNK(3, first_slice, 3, "chunks.first_slice", 3),
    IN_CHUNK(3, first_slice, INT64_MIN, "chunks.first_slice", 3),
    IN_CHUNK(2, n_slices, 4, "chunks.n_slices", 2),
    IN_CHUNK(2, n_slices, INT64_MAX, "chunks.n_slices", 2),
    IN_CHUNK(1, n_slices, 0, "chunks.n_slices", 1),
    IN_CHUNK(3, n_slices, -1, "chunks.n_slices", 3),
    IN_CHUNK(1, n_slices, 2, "chunks.n_slices", 1), /* hybrid, but not the last of its chain */
    IN_CHUNK(2, tokens, 14, "chunks.tokens", 2),
    IN_CHUNK(7, tokens, 1, "chunks.tokens", 7),
    IN_CHUNK(5, rows, 12, "chunks.rows", 5),
    IN_CHUNK(3, pairs, 137, "chunks.pairs", 3),
    IN_CHUNK(1, pairs, 136, "chunks.pairs", 1), /* the prefix left out */
    IN_CHUNK(3, chain, 2, "chunks.chain", 3),
    IN_CHUNK(3, chain, -2, "chunks.chain", 3),
    IN_CHUNK(3, chain, 0, "chunks.chain", 3),
    IN_CHUNK(0, chain, 1, "chunks.chain", 0),
    IN_CHUNK(1, index, 2, "chunks.index", 1),
    IN_CHUNK(3, index, 1, "chunks.index", 3),
    IN_CHUNK(1, prefix, 15, "chunks.prefix", 1),
    IN_CHUNK(0, prefix, 16, "chunks.prefix", 0),
    IN_CHUNK(6, prefix, 1, "chunks.prefix", 6),
    IN_CHUNK(3, rank, 1, "chunks.rank", 3),
    IN_CHUNK(7, rank, -1, "chunks.rank", 7),
    IN_CHUNK(1, up, -1, "chunks.up", 1),
    IN_CHUNK(3, up, 2, "chunks.up", 3),
    IN_CHUNK(4, up, 3, "chunks.up", 4),
    IN_CHUNK(0, down, 2, "chunks.up", 2), /* which continues another one */
    IN_CHUNK(0, down, 0, "chunks.down", 0),
    IN_CHUNK(1, down, -1, "chunks.down", 1),
    IN_CHUNK(2, down, 3, "chunks.down", 2),
    IN_CHUNK(1, down, INT64_MAX, "chunks.down", 1),
    IN_CHUNK(0, below, 3, "chunks.below", 0),
    IN_CHUNK(0, below, 1, "chunks.below", 0),
    IN_CHUNK(3, below, 1, "chunks.below", 3),
    IN_CHUNK(0, state, 15, "chunks.state", 0),
    IN_CHUNK(1, state, 0, "chunks.state", 1),
    IN_CHUNK(3, state, 16, "chunks.state", 3),
    IN_CHUNK(5, state, 10, "chunks.state", 5),
    IN_CHUNK(5, state, 17, "chunks.state", 5),
    IN_CHUNK(0, cp, 2, "chunks.cp", 0),
    IN_CHUNK(7, cp, -1, "chunks.cp", 7),

    IN_SLICE(4, sequence, 7, "slices.sequence", 4),
    IN_SLICE(4, sequence, -1, "slices.sequence", 4),
    IN_SLICE(4, sequence, INT32_MAX, "slices.sequence", 4),
    IN_SLICE(8, begin, 1, "slices.length", 8),  /* then it extends past the end of its sequence */
    IN_SLICE(8, begin, -1, "slices.begin", 8),
    IN_SLICE(8, begin, 3, "slices.begin", 8),
    IN_SLICE(1, begin, 15, "slices.begin", 1),
    IN_SLICE(8, length, 2, "slices.length", 8),
    IN_SLICE(8, length, 4, "slices.length", 8),
    IN_SLICE(8, length, 0, "slices.length", 8),
    IN_SLICE(8, length, INT32_MIN, "slices.length", 8),
    IN_SLICE(0, length, 17, "slices.length", 0), /* more than chunk_size */
    IN_SLICE(3, offset, 7, "slices.offset", 3),
    IN_SLICE(3, offset, 12, "slices.offset", 3),
    IN_SLICE(0, offset, 4, "slices.offset", 0),

    IN_CHAIN(0, sequence, 7, "chains.sequence", 0),
    IN_CHAIN(0, sequence, -1, "chains.sequence", 0),
    IN_CHAIN(0, sequence, 5, "chains.sequence", 0), /* the first slice of the chain belongs to another sequence */
    IN_CHAIN(1, first_chunk, 5, "chunks.chain", 4),
    IN_CHAIN(1, first_chunk, -1, "chains.first_chunk", 1),
    IN_CHAIN(1, first_chunk, INT64_MAX, "chains.first_chunk", 1),
    IN_CHAIN(0, n_chunks, 2, "chunks.n_slices", -2), /* see below: one chunk too many, or a sum too small */
    IN_CHAIN(0, n_chunks, 4, "chunks.chain", 3),
    IN_CHAIN(0, n_chunks, 0, "chains.n_chunks", 0),
    IN_CHAIN(0, n_chunks, INT64_MIN, "chains.n_chunks", 0),
    IN_CHAIN(0, tokens, 39, "chains.tokens", 0),
    IN_CHAIN(1, tokens, INT64_MAX, "chains.tokens", 1),
};

/* Returns what stood there. */
static int64_t apply(cf_plan *plan, const damage *d) {
    char *base = d->place == HEADER  ? (char *)plan
                 : d->place == CHUNK ? (char *)&plan->chunks[d->index]
                 : d->place == SLICE ? (char *)&plan->slices[d->index]
                                     : (char *)&plan->chains[d->index];
    const oracle_number number = {base + d->member, d->bytes};
    int64_t was = oracle_read(number);
    oracle_write(number, d->value);
    return was;
}

/* Returns whether the error names the damaged member and its value. For a chain, a sequence or an alignment that
   contradicts other numbers, it names those. */
static int blames_member(const damage *d) {
    const char *dot = strchr(d->field, '.');
    if (strcmp(d->field, "chunks.chain") == 0 || strcmp(d->field, "slices.sequence") == 0) return 0;
    if (strcmp(d->field, "align") == 0 && d->value == 3) return 0;
    return d->name != NULL && strcmp(dot ? dot + 1 : d->field, d->name) == 0;
}

TEST(each_kind_of_damage_is_named) {
    size_t i;
    for (i = 0; i < sizeof damages / sizeof damages[0]; i++) {
        const damage *d = &damages[i];
        cf_plan plan = known_plan();
        cf_error error;
        const int64_t was = apply(&plan, d);
        harness_note("damage %d: value %lld, to be named %s[%lld]", (int)i, (long long)d->value, d->field,
                     (long long)d->item);
        harness_poison(&error, sizeof error);
        if (!CHECK_INT(cf_plan_validate(&plan, known_lengths, N_KNOWN, NULL, &error), CF_ERROR_PLAN)) {
            drop_copy(&plan);
            continue;
        }
        CHECK_INT(error.code, CF_ERROR_PLAN);
        if (d->item == -2) {
            CHECK_STR(error.field, "chunks.chain"); /* chunk 2 claims chain 0, which now ends before it */
            CHECK_INT(error.item, 2);
        } else {
            CHECK_STR(error.field, d->field);
            CHECK_INT(error.item, d->item);
            if (blames_member(d))
                CHECK_STR(oracle_change_fault(&error, d->field, d->item, was, d->value), NULL);
        }
        CHECK_STR(oracle_error_fault(&error), NULL);
        CHECK(strchr(error.text, '\n') == NULL);
        CHECK_INT(cf_plan_validate(&plan, known_lengths, N_KNOWN, NULL, NULL), CF_ERROR_PLAN);
        drop_copy(&plan);
    }
}

/* ---- damage that takes more than one number ---- */

/* A chain where no slice exists at all: nothing to read. */
TEST(a_chain_without_slices) {
    const int64_t lengths[] = {5};
    cf_chunk chunk = {0};
    cf_chain chain = {0, 0, 1, 5, 0};
    cf_plan plan = {0};
    cf_error error;
    chunk.chain = chunk.up = chunk.down = -1;
    plan.chunk_size = 8;
    plan.align = 1;
    plan.method = CF_PACK_BEST_FIT;
    plan.split = CF_SPLIT_FULL;
    plan.n_sequences = plan.n_ranks = plan.chunks_per_rank = plan.n_chunks = plan.n_idle = plan.n_chains = 1;
    plan.n_tokens = 5;
    plan.chunks = &chunk;
    plan.chains = &chain;
    CHECK_INT(cf_plan_validate(&plan, lengths, 1, NULL, &error), CF_ERROR_PLAN);
    CHECK_STR(error.field, "chunks.chain");
    CHECK_INT(error.item, 0);
}

/* 0 would mean "default", which a hand-made plan may use. */
TEST(impossible_methods_are_named) {
    const int bad[] = {-1, 4, 99};
    size_t i;
    for (i = 0; i < sizeof bad / sizeof bad[0]; i++) {
        cf_plan plan = known_plan();
        cf_error error = {0};
        memcpy(&plan.method, &bad[i], sizeof plan.method);
        CHECK_INT(cf_plan_validate(&plan, known_lengths, N_KNOWN, NULL, &error), CF_ERROR_PLAN);
        CHECK_STR(error.field, "method");
        plan.method = CF_PACK_NEXT_FIT;
        memcpy(&plan.split, &bad[i], sizeof plan.split);
        CHECK_INT(cf_plan_validate(&plan, known_lengths, N_KNOWN, NULL, &error), CF_ERROR_PLAN);
        CHECK_STR(error.field, "split");
        drop_copy(&plan);
    }
}

/* ---- random damage: the library and the oracle agree on soundness ---- */

static int64_t draw_value(harness_rng *rng, int64_t old, int64_t align) {
    static const int64_t far_out[] = {INT64_MAX, INT64_MIN, INT32_MAX, -1000000007, (int64_t)1 << 48};
    switch (harness_between(rng, 0, 7)) {
        case 0: return (int64_t)((uint64_t)old + 1u); /* may wrap */
        case 1: return (int64_t)((uint64_t)old - 1u);
        case 2: return (int64_t)((uint64_t)old + (uint64_t)align);
        case 3: return (int64_t)((uint64_t)old - (uint64_t)align);
        case 4: return 0;
        case 5: return -1;
        case 6: return harness_between(rng, 0, 40);
        default: return far_out[harness_between(rng, 0, 4)];
    }
}

/* Returns a number of a chunk, a slice or a chain. */
static oracle_number number_of(cf_plan *plan, int64_t what, int64_t item, int64_t member) {
    oracle_number number = {what == 0 ? &plan->chunks[item].first_slice + member : &plan->chains[item].sequence + member,
                            sizeof(int64_t)};
    return what == 1 ? oracle_slice_number(&plan->slices[item], member) : number;
}

/* Sets one number, drawn from all numbers in the arrays, or exchanges two items. */
static void damage_once(harness_rng *rng, cf_plan *plan) {
    const int64_t members[] = {sizeof(cf_chunk) / sizeof(int64_t), ORACLE_SLICE_NUMBERS,
                               sizeof(cf_chain) / sizeof(int64_t)};
    const int64_t counts[] = {plan->n_chunks, plan->n_slices, plan->n_chains};
    int64_t what = harness_between(rng, 0, 2), n = members[what], a, b, member, i;
    if (counts[what] == 0) return;
    a = harness_between(rng, 0, counts[what] - 1);
    b = harness_between(rng, 0, counts[what] - 1);
    member = harness_between(rng, 0, n - 1);
    if (harness_chance(rng, 0.15)) {
        for (i = 0; i < n; i++) {
            const oracle_number one = number_of(plan, what, a, i), other = number_of(plan, what, b, i);
            int64_t was = oracle_read(one);
            oracle_write(one, oracle_read(other));
            oracle_write(other, was);
        }
        return;
    }
    {
        const oracle_number one = number_of(plan, what, a, member);
        if (harness_chance(rng, 0.2)) oracle_write(one, oracle_read(number_of(plan, what, b, member)));
        else oracle_write(one, draw_value(rng, oracle_read(one), plan->align));
    }
}

TEST(random_damage_is_judged_as_by_the_oracle) {
    static oracle_batch batch;
    int i, k, faults = 0, sound = 0;
    for (i = 0; i < 1500; i++) {
        uint64_t seed = 20000000 + (uint64_t)i;
        harness_rng rng = {seed};
        cf_plan *plan = NULL;
        oracle_draw(&rng, &batch, 12);
        oracle_note(seed, &batch);
        REQUIRE(cf_pack(batch.lengths, batch.n, &batch.desc, &plan, NULL) == CF_OK);
        for (k = 0; k < 12; k++) {
            cf_plan copy = copy_plan(plan);
            int64_t count = harness_between(&rng, 1, 3), j;
            const char *fault;
            cf_error error;
            for (j = 0; j < count; j++) damage_once(&rng, &copy);
            fault = oracle_plan_fault(&copy, batch.lengths, batch.n);
            harness_poison(&error, sizeof error);
            if (fault) {
                if (!CHECK_INT(cf_plan_validate(&copy, batch.lengths, batch.n, NULL, &error), CF_ERROR_PLAN))
                    FAIL("not noticed: %s", fault);
                faults++;
            } else {
                if (!CHECK_INT(cf_plan_validate(&copy, batch.lengths, batch.n, NULL, &error), CF_OK))
                    FAIL("a sound plan refused: %s", error.text);
                sound++;
            }
            drop_copy(&copy);
        }
        cf_plan_free(plan);
    }
    harness_report("%d damaged, %d still sound", faults, sound);
    CHECK(faults > 10000);
}

/* ---- arguments ---- */

TEST(validate_refuses_bad_arguments) {
    cf_plan plan = known_plan();
    harness_heap heap = {0};
    cf_allocator half = {harness_alloc, NULL, NULL};
    cf_error error;
    half.user = &heap;
    CHECK_INT(cf_plan_validate(NULL, known_lengths, N_KNOWN, NULL, &error), CF_ERROR_ARGUMENT);
    CHECK_STR(error.field, "plan");
    CHECK_INT(cf_plan_validate(&plan, NULL, N_KNOWN, NULL, &error), CF_ERROR_ARGUMENT);
    CHECK_STR(error.field, "lengths");
    CHECK_INT(cf_plan_validate(&plan, known_lengths, N_KNOWN, &half, &error), CF_ERROR_ARGUMENT);
    CHECK_STR(error.field, "allocator.release");
    CHECK_INT(heap.calls, 0);
#define REFUSE_WITHOUT(array)                                                                     \
    do {                                                                                          \
        cf_plan less = plan;                                                                      \
        less.array = NULL;                                                                        \
        CHECK_INT(cf_plan_validate(&less, known_lengths, N_KNOWN, NULL, &error), CF_ERROR_PLAN);  \
        CHECK_STR(error.field, #array);                                                           \
        CHECK_INT(error.item, -1);                                                                \
    } while (0)
    REFUSE_WITHOUT(chunks);
    REFUSE_WITHOUT(slices);
    REFUSE_WITHOUT(chains);
#undef REFUSE_WITHOUT
    drop_copy(&plan);
}

/* One token more than the chunks of the first sequence have, in the batch and in the sum. */
TEST(a_chain_that_ends_too_early) {
    cf_plan plan = known_plan();
    int64_t longer[N_KNOWN];
    cf_error error;
    memcpy(longer, known_lengths, sizeof longer);
    longer[0]++;
    plan.n_tokens++;
    CHECK_INT(cf_plan_validate(&plan, longer, N_KNOWN, NULL, &error), CF_ERROR_PLAN);
    CHECK_STR(error.field, "chains.n_chunks");
    CHECK_INT(error.item, 0);
    drop_copy(&plan);
}

/* All numbers of a slice or a chain agree, except for the sequence that they name. */
TEST(a_sequence_that_is_there_twice) {
    const int64_t lengths[] = {20, 5, 5, 20};
    const cf_pack_desc desc = {.chunk_size = 16, .no_tails = 1};
    cf_plan *plan = NULL;
    cf_error error;
    int64_t i;
    REQUIRE(cf_pack(lengths, 4, &desc, &plan, NULL) == CF_OK && plan->n_slices == 6 && plan->chains[1].sequence == 3);
    plan->slices[5].sequence = plan->slices[5].first = plan->slices[4].sequence;
    CHECK_INT(cf_plan_validate(plan, lengths, 4, NULL, &error), CF_ERROR_PLAN);
    CHECK_STR(error.field, "slices.sequence");
    CHECK_INT(error.item, 5);
    plan->slices[5].sequence = plan->slices[5].first = 3 - plan->slices[4].sequence;
    CHECK_INT(cf_plan_validate(plan, lengths, 4, NULL, &error), CF_OK);
    for (i = 2; i < 4; i++) plan->slices[i].sequence = plan->slices[i].first = 0;
    plan->chains[1].sequence = 0;
    CHECK_INT(cf_plan_validate(plan, lengths, 4, NULL, &error), CF_ERROR_PLAN);
    CHECK_STR(error.field, "slices.sequence");
    CHECK_INT(error.item, 2);
    cf_plan_free(plan);
}

/* The first of two chunks ends one token before an aligned place, and all dependent numbers agree. */
TEST(a_chunk_that_ends_between_two_places) {
    cf_plan copy = known_plan();
    cf_error error;
    copy.chunks[4].tokens = copy.chunks[4].state = copy.slices[5].length = 15;
    copy.chunks[5].prefix = copy.slices[6].begin = 15;
    copy.chunks[5].state = copy.slices[6].length = 6;
    copy.chunks[4].pairs = 120;
    copy.chunks[5].tokens = 11;
    copy.chunks[5].pairs = 126;
    CHECK_INT(cf_plan_validate(&copy, known_lengths, N_KNOWN, NULL, &error), CF_ERROR_PLAN);
    CHECK_STR(error.field, "slices.begin");
    CHECK_INT(error.item, 6);
    CHECK_INT(error.wanted, 12);
    drop_copy(&copy);
}

/* Two sequences of three tokens are in a chunk of six, but five are allowed. All other numbers agree. */
TEST(a_chunk_of_one_row_too_many) {
    const int64_t lengths[] = {3, 3};
    const cf_pack_desc desc = {.chunk_size = 6};
    cf_plan *plan = NULL;
    cf_error error;
    REQUIRE(cf_pack(lengths, 2, &desc, &plan, NULL) == CF_OK && plan->n_chunks == 1);
    plan->chunk_size = 5;
    CHECK_INT(cf_plan_validate(plan, lengths, 2, NULL, &error), CF_ERROR_PLAN);
    CHECK_STR(error.field, "chunks.rows");
    CHECK_INT(error.wanted, 5);
    CHECK_INT(error.got, 6);
    cf_plan_free(plan);
}

/* A list on one rank has no more chains than sequences. */
TEST(more_chains_than_sequences_are_refused) {
    const int64_t lengths[] = {40};
    const cf_pack_desc desc = {.chunk_size = 8};
    cf_plan *plan = NULL;
    cf_error error;
    REQUIRE(cf_pack(lengths, 1, &desc, &plan, NULL) == CF_OK && plan->n_chunks == 5 && plan->n_chains == 1);
    plan->n_chains = 2;
    CHECK_INT(cf_plan_validate(plan, lengths, 1, NULL, &error), CF_ERROR_PLAN);
    CHECK_STR(error.field, "n_chains");
    CHECK_INT(error.wanted, 1);
    cf_plan_free(plan);
}

/* The last chunk of rank 1's chain claims that a chunk of rank 0 continues it, and that chunk agrees. A schedule of
   rank 1 visits no chunk of rank 0, and must not follow the link. */
TEST(no_chunk_of_another_rank_continues_a_chunk) {
    cf_plan plan = known_plan();
    cf_schedule_desc desc = {.shape = {.n_stages = 1, .rank = 1}};
    cf_schedule *schedule = NULL;
    cf_error error;
    CHECK_INT(cf_schedule_make(&plan, &desc, &schedule, &error), CF_OK);
    cf_schedule_free(schedule);
    schedule = NULL;
    plan.chunks[4].below = 2;
    plan.chunks[5].below = 1;
    plan.chunks[5].down = 1;
    plan.chunks[1].up = 5;
    CHECK_INT(cf_schedule_make(&plan, &desc, &schedule, &error), CF_ERROR_PLAN);
    CHECK_STR(error.field, "chunks.down");
    CHECK_INT(error.item, 5);
    CHECK(schedule == NULL);
    drop_copy(&plan);
}

static void *count_bytes(size_t bytes, void *sum) {
    *(size_t *)sum += bytes;
    return malloc(bytes);
}

static void release_bytes(void *memory, void *sum) {
    (void)sum;
    free(memory);
}

/* As the header says: 1 byte per sequence and 8 per chunk, with trees 33 and 16. Alignment, one more sum, and a
   sanitizer's gaps between arrays take the rest. */
TEST(validate_takes_the_scratch_that_it_says) {
    enum { N = 1000 };
    static cf_shared_prefix shares[N];
    int64_t lengths[N], i, trees;
    for (i = 0; i < N; i++) {
        lengths[i] = 16 + i % 5;
        shares[i].with = i - i % 2;
        shares[i].tokens = i % 2 * 8;
    }
    for (trees = 0; trees < 2; trees++) {
        cf_pack_desc desc = {.chunk_size = 16, .shared_prefixes = trees ? shares : NULL, .min_shared_prefix = trees};
        size_t bytes = 0, wanted;
        cf_allocator allocator = {count_bytes, release_bytes, &bytes};
        cf_plan *plan = NULL;
        REQUIRE(cf_pack(lengths, N, &desc, &plan, NULL) == CF_OK);
        CHECK_INT(plan->order != NULL, trees);
        CHECK_INT(cf_plan_validate(plan, lengths, N, &allocator, NULL), CF_OK);
        wanted = (size_t)(trees ? 33 * N + 16 * plan->n_chunks : N + 8 * plan->n_chunks);
        CHECK(bytes >= wanted && bytes <= wanted + 512);
        cf_plan_free(plan);
    }
}

/* A plan that nobody has validated. */
TEST(fewer_than_no_rows_are_no_bytes) {
    cf_plan plan = known_plan();
    cf_schedule_desc desc = {.limits = {.bytes = 1000, .per_token = {1, 1, 1, 1}}};
    cf_schedule *schedule = NULL;
    cf_error error;
    plan.chunks[3].rows = -16;
    CHECK_INT(cf_schedule_make(&plan, &desc, &schedule, &error), CF_ERROR_OVERFLOW);
    CHECK_STR(error.field, "limits.per_token");
    cf_schedule_free(schedule);
    drop_copy(&plan);
}

SUITE(validate, CASE(a_plan_made_by_hand_is_accepted), CASE(each_kind_of_damage_is_named), CASE(a_chain_without_slices),
      CASE(impossible_methods_are_named), CASE(random_damage_is_judged_as_by_the_oracle),
      CASE(validate_refuses_bad_arguments), CASE(a_chain_that_ends_too_early), CASE(fewer_than_no_rows_are_no_bytes),
      CASE(a_chunk_that_ends_between_two_places),
      CASE(a_chunk_of_one_row_too_many), CASE(more_chains_than_sequences_are_refused),
      CASE(no_chunk_of_another_rank_continues_a_chunk),
      CASE(validate_takes_the_scratch_that_it_says), CASE(a_sequence_that_is_there_twice));
