/* Tests >>steps: the steps of a stage. A second set of books follows the header's definitions: damaged schedules are
   refused at the same action. steps_fault judges the contents of steps. */

#include "chunkflow.h"
#include "../harness.h"
#include "../reference/naive.h"
#include "../reference/oracle.h"
#include "../reference/steps.h"

#include <stddef.h>
#include <stdlib.h>
#include <string.h>

#define MOST_CHUNKS 400
#define MOST_ACTIONS (3 * MOST_CHUNKS + 10)

/* ---- the second set of books ---- */

typedef struct chunk_book {
    int forwarded, kept, backward; /* backward: 0 none, 1 only I, 2 whole */
} chunk_book;

typedef struct books {
    const cf_plan *plan;
    int64_t rank;
    chunk_book chunks[MOST_CHUNKS];
    int state_held[MOST_CHUNKS];
} books;

static void raise_to(int64_t *peak, int64_t value) {
    if (value > *peak) *peak = value;
}

/* dK and dV of a chunk are complete when every later chunk of its chain has run its backward. */
static int later_chunks_are_done(const books *b, const cf_chunk *chunk) {
    int64_t i;
    const cf_chain *chain;
    if (chunk->chain < 0) return 1;
    chain = &b->plan->chains[chunk->chain];
    for (i = chunk->index + 1; i < chain->n_chunks; i++)
        if (!b->chunks[chain->first_chunk + i].backward) return 0;
    return 1;
}

static int earlier_chunks_are_held(const books *b, const cf_chunk *chunk) {
    int64_t i;
    const cf_chain *chain;
    if (chunk->chain < 0) return 1;
    chain = &b->plan->chains[chunk->chain];
    for (i = 0; i < chunk->index; i++) {
        const chunk_book *earlier = &b->chunks[chain->first_chunk + i];
        if (!earlier->forwarded || earlier->backward) return 0;
    }
    return 1;
}

static int action_is_possible(const books *b, const cf_action *a) {
    const cf_chunk *chunk;
    const chunk_book *book;
    if (a->chunk < 0 || a->chunk >= b->plan->n_chunks || a->stage != 0 || a->pass >= CF_PASS_COUNT) return 0;
    if (a->reserved != 0 || a->keep > 1 || (a->keep && a->pass != CF_F && a->pass != CF_R)) return 0;
    chunk = &b->plan->chunks[a->chunk];
    book = &b->chunks[a->chunk];
    if (chunk->rank != b->rank) return 0;
    switch (a->pass) {
        case CF_F: return !book->forwarded && earlier_chunks_are_held(b, chunk);
        case CF_R: return book->forwarded && !book->kept && !book->backward && a->keep;
        case CF_B:
        case CF_I: return book->kept && !book->backward && later_chunks_are_done(b, chunk);
        case CF_W: return book->kept && book->backward == 1;
        default: return 0;
    }
}

static void book_action(books *b, const cf_action *a) {
    const cf_chunk *chunk = &b->plan->chunks[a->chunk];
    chunk_book *book = &b->chunks[a->chunk];
    if (a->pass == CF_F) book->forwarded = 1;
    if (a->pass == CF_F && chunk->chain >= 0) b->state_held[chunk->chain] = 1;
    if (a->keep) book->kept = 1;
    if (a->pass == CF_B || a->pass == CF_I) {
        book->backward = a->pass == CF_I ? 1 : 2;
        if (chunk->chain >= 0 && chunk->index == 0) b->state_held[chunk->chain] = 0;
    }
    if (a->pass == CF_W) book->backward = 2;
    if (a->pass == CF_B || a->pass == CF_W) book->kept = 0;
}

static books *new_books(const cf_plan *plan, int64_t rank) {
    books *b = (books *)calloc(1, sizeof *b);
    CHECK(b != NULL && plan->n_chunks <= MOST_CHUNKS);
    if (b) {
        b->plan = plan;
        b->rank = rank;
    }
    return b;
}

/* Returns the position of the first impossible action, or -1. The books stay as they are at this action. */
static int64_t book_all(books *b, const cf_action *actions, int64_t n) {
    int64_t i;
    for (i = 0; i < n; i++) {
        if (!action_is_possible(b, &actions[i])) return i;
        book_action(b, &actions[i]);
    }
    return -1;
}

/* Returns whether some chunk of the rank has not been trained, or a slot is still in use. */
static int books_are_open(const books *b) {
    int64_t i;
    for (i = 0; i < b->plan->n_chunks; i++)
        if (b->plan->chunks[i].rank == b->rank && (b->chunks[i].backward != 2 || b->chunks[i].kept)) return 1;
    for (i = 0; i < b->plan->n_chains; i++)
        if (b->state_held[i]) return 1;
    return 0;
}

/* ---- plans and schedules to run ---- */

typedef struct fixture {
    cf_plan *plan;
    cf_schedule *schedule;
} fixture;

static void drop_fixture(fixture *f) {
    cf_schedule_free(f->schedule);
    cf_plan_free(f->plan);
    f->plan = NULL;
    f->schedule = NULL;
}

/* The plan is NULL if the batch is too large for the books. */
static fixture draw_fixture(uint64_t seed, int64_t most_sequences) {
    static oracle_batch batch;
    harness_rng rng = {seed};
    fixture f = {NULL, NULL};
    cf_schedule_desc desc = {0};
    oracle_draw(&rng, &batch, most_sequences);
    oracle_note(seed, &batch);
    CHECK_INT(cf_pack(batch.lengths, batch.n, &batch.desc, &f.plan, NULL), CF_OK);
    if (!f.plan || f.plan->n_chunks > MOST_CHUNKS) {
        drop_fixture(&f);
        return f;
    }
    desc.kind = CF_SCHEDULE_PAPER;
    desc.shape.replay = CF_REPLAY_PIPELINE;
    desc.shape.k = harness_between(&rng, 1, 5);
    desc.shape.rank = harness_between(&rng, 0, f.plan->n_ranks - 1);
    CHECK_INT(cf_schedule_make(f.plan, &desc, &f.schedule, NULL), CF_OK);
    if (!f.schedule) drop_fixture(&f);
    return f;
}

/* Makes a chain of five chunks and two standalone ones. */
static fixture known_fixture(int64_t k) {
    const int64_t lengths[] = {38, 8, 7, 2, 5};
    cf_pack_desc pack = {0};
    cf_schedule_desc order = {0};
    fixture f = {NULL, NULL};
    pack.chunk_size = 8;
    order.kind = CF_SCHEDULE_PAPER;
    order.shape.replay = CF_REPLAY_PIPELINE;
    order.shape.k = k;
    CHECK_INT(cf_pack(lengths, COUNT(lengths), &pack, &f.plan, NULL), CF_OK);
    CHECK_INT(cf_schedule_make(f.plan, &order, &f.schedule, NULL), CF_OK);
    return f;
}

/* ---- good schedules ---- */

TEST(counts_by_hand) {
    /* 38 tokens in chunks of 8: 8 8 8 8 6, with 2 more in the last chunk; then 8, 7 and 5 alone */
    const int64_t slots[] = {1, 2, 3, 4, 5, 5};
    const int64_t tokens[] = {8, 16, 24, 32, 40, 40};
    int64_t k;
    for (k = 1; k <= 6; k++) {
        fixture f = known_fixture(k);
        cf_steps *steps = NULL;
        REQUIRE(f.plan && f.schedule);
        CHECK_INT(f.plan->n_chunks, 8);
        REQUIRE(cf_steps_make(f.plan, f.schedule, 0, 0, NULL, &steps, NULL) == CF_OK);
        CHECK_INT(steps->n_slots, slots[k - 1]);
        CHECK_INT(steps->peak_tokens, tokens[k - 1]);
        CHECK_INT(steps->n_states, 1);
        CHECK_INT(steps->peak_state_tokens, 38);
        CHECK_INT(steps->n, f.schedule->n_actions);
        cf_steps_free(steps);
        drop_fixture(&f);
    }
}

/* Buffers for many batches: the largest of each member that any batch needs, found chunk by chunk. */
TEST(capacities_are_high_water_marks) {
    static oracle_batch batch;
    cf_capacity most = {0, 0, 0, 0, 0, 0, 0}, wanted = {0, 0, 0, 0, 0, 0, 0};
    int i;
    for (i = 0; i < 300; i++) {
        harness_rng rng = {43000000 + (uint64_t)i};
        cf_plan *plan = NULL;
        cf_schedule *schedule = NULL;
        cf_schedule_desc order;
        cf_steps *steps = NULL;
        int64_t c, j;
        oracle_draw(&rng, &batch, 12);
        memset(&order, 0, sizeof order);
        order.kind = CF_SCHEDULE_PAPER;
        order.shape.k = harness_between(&rng, 1, 3);
        REQUIRE(cf_pack(batch.lengths, batch.n, &batch.desc, &plan, NULL) == CF_OK);
        REQUIRE(cf_schedule_make(plan, &order, &schedule, NULL) == CF_OK);
        REQUIRE(cf_steps_make(plan, schedule, 0, 0, NULL, &steps, NULL) == CF_OK);
        for (c = 0; c < plan->n_chunks; c++) {
            const cf_chunk *chunk = &plan->chunks[c];
            int64_t n_seqs = chunk->n_slices + 1; /* there may be padding after the last slice ... */
            for (j = 0; j + 1 < chunk->n_slices; j++) {
                const cf_slice *s = &plan->slices[chunk->first_slice + j];
                n_seqs += s->offset + s->length < s[1].offset; /* ... and there is padding after this one */
            }
            raise_to(&wanted.rows, chunk->rows);
            raise_to(&wanted.prefix, chunk->prefix);
            CHECK(n_seqs <= (plan->align > 1 ? 2 * chunk->n_slices + (chunk->n_slices == 0) : chunk->n_slices + 1));
            raise_to(&wanted.n_seqs, plan->align > 1 && chunk->n_slices > 0 ? 2 * chunk->n_slices : n_seqs);
        }
        raise_to(&wanted.activations, steps->n_slots);
        raise_to(&wanted.states, steps->n_states);
        raise_to(&wanted.outputs, steps->n_outputs);
        CHECK_INT(cf_steps_capacity(plan, steps, &most, NULL), CF_OK);
        CHECK(most.rows == wanted.rows && most.prefix == wanted.prefix && most.n_seqs == wanted.n_seqs);
        CHECK(most.activations == wanted.activations && most.states == wanted.states && most.boundaries == 0 &&
              most.outputs == wanted.outputs && most.outputs > 0);
        cf_steps_free(steps);
        cf_schedule_free(schedule);
        cf_plan_free(plan);
    }
}

TEST(a_capacity_is_raised_only_where_all_is_well) {
    fixture f = known_fixture(2);
    cf_capacity most, poison;
    cf_steps *steps = NULL;
    cf_error error;
    REQUIRE(f.plan && f.schedule && cf_steps_make(f.plan, f.schedule, 0, 0, NULL, &steps, NULL) == CF_OK);
    harness_poison(&most, sizeof most);
    poison = most;
    CHECK_INT(cf_steps_capacity(NULL, steps, &most, &error), CF_ERROR_ARGUMENT);
    CHECK_STR(error.field, "plan");
    CHECK_INT(cf_steps_capacity(f.plan, steps, NULL, &error), CF_ERROR_ARGUMENT);
    CHECK_STR(error.field, "capacity");
    CHECK(memcmp(&most, &poison, sizeof most) == 0);
    memset(&most, 0, sizeof most);
    CHECK_INT(cf_steps_capacity(f.plan, NULL, &most, &error), CF_OK);
    CHECK(most.rows == 8 && most.prefix == 32 && most.n_seqs == 3 && most.activations == 0 && most.states == 0);
    cf_steps_free(steps);
    drop_fixture(&f);
}

/* Without steps nothing has validated the plan before, and with steps nobody has validated other ranks' chunks. */
TEST(a_capacity_is_not_read_past_the_plan) {
    static const struct {
        const char *field;
        size_t offset; /* offset of the damaged member */
        int64_t value;
    } cases[] = {{"chunks.first_slice", offsetof(cf_chunk, first_slice), -1},
                 {"chunks.first_slice", offsetof(cf_chunk, first_slice), INT64_MAX},
                 {"chunks.n_slices", offsetof(cf_chunk, n_slices), -1},
                 {"chunks.n_slices", offsetof(cf_chunk, n_slices), INT64_MAX},
                 {"chunks.chain", offsetof(cf_chunk, chain), INT64_MAX},
                 {"chunks.index", offsetof(cf_chunk, index), INT64_MAX},
                 {"chunks.index", offsetof(cf_chunk, index), -1},
                 {"chunks.prefix", offsetof(cf_chunk, prefix), INT64_MAX},
                 {"chunks.prefix", offsetof(cf_chunk, prefix), -1},
                 {"chunks.rows", offsetof(cf_chunk, rows), -1}};
    fixture f = known_fixture(2);
    size_t i;
    REQUIRE(f.plan && f.plan->n_chains > 0);
    for (i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        unsigned char *chunk = (unsigned char *)&f.plan->chunks[f.plan->chains[0].first_chunk + 1];
        int64_t *damaged = (int64_t *)(void *)(chunk + cases[i].offset), sound = *damaged;
        cf_capacity most, poison;
        cf_error error;
        harness_poison(&most, sizeof most);
        poison = most;
        *damaged = cases[i].value;
        CHECK_INT(cf_steps_capacity(f.plan, NULL, &most, &error), CF_ERROR_PLAN);
        CHECK_STR(error.field, cases[i].field);
        CHECK(memcmp(&most, &poison, sizeof most) == 0);
        *damaged = sound;
    }
    drop_fixture(&f);
}

TEST(a_seed_belongs_to_chunk_and_stage) {
    enum { SIDE = 300 };
    static uint64_t seeds[SIDE * SIDE / 10];
    int64_t chunk, stage, n = 0, i, ones = 0;
    int repeated = 0;
    for (chunk = 0; chunk < SIDE; chunk++)
        for (stage = 0; stage < SIDE / 10; stage++) seeds[n++] = cf_chunk_seed(42, chunk, stage);
    for (i = 0; i < n; i++) {
        int64_t j;
        for (j = 0; j < 64; j++) ones += (int64_t)(seeds[i] >> j & 1);
        for (j = i + 1; j < n && j < i + 700; j++) repeated += seeds[i] == seeds[j];
    }
    CHECK_INT(repeated, 0);
    CHECK(ones > n * 32 - n && ones < n * 32 + n); /* half of the bits, within far more than chance would differ */
    CHECK(cf_chunk_seed(42, 7, 3) == cf_chunk_seed(42, 7, 3));
    CHECK(cf_chunk_seed(42, 7, 3) != cf_chunk_seed(43, 7, 3));
    CHECK(cf_chunk_seed(42, 7, 3) != cf_chunk_seed(42, 3, 7));
    CHECK(cf_chunk_seed(0, 0, 0) != 0);
}

/* ---- schedules made by hand, and damaged ones ---- */

/* Reads "F0 F1+ B1" into a schedule for the plan. */
static int64_t read_actions(const char *text, cf_action *actions) {
    static const char passes[] = "FRBIW";
    int64_t n = 0;
    while (*text) {
        char *end;
        cf_action *a = &actions[n++];
        memset(a, 0, sizeof *a);
        a->pass = (uint8_t)(strchr(passes, *text) - passes);
        a->chunk = (int32_t)strtol(text + 1, &end, 10);
        a->keep = *end == '+';
        text = end + (*end == '+');
        while (*text == ' ') text++;
    }
    return n;
}

static cf_schedule wrap_actions(const cf_plan *plan, int64_t rank, cf_action *actions, int64_t n, int64_t first[2]) {
    cf_schedule schedule = {0};
    schedule.kind = CF_SCHEDULE_PAPER;
    schedule.shape.replay = CF_REPLAY_PIPELINE;
    schedule.shape.n_stages = schedule.shape.n_virtual = 1;
    schedule.shape.k = 1;
    schedule.shape.rank = rank;
    schedule.n_chunks = plan->n_chunks;
    schedule.n_actions = n;
    first[0] = 0;
    first[1] = n;
    schedule.first = first;
    schedule.actions = actions;
    return schedule;
}

/* Makes the steps of a text for one chain of three chunks (0, 1, 2) and one standalone chunk (3). wanted_at: -2 if
   accepted, -1 if refused at the end, else the position of the refused action. */
static void check_by_hand(const char *text, int64_t wanted_at) {
    const int64_t lengths[] = {12, 4};
    cf_plan *plan = NULL;
    cf_action actions[40];
    cf_schedule schedule;
    cf_steps *steps = NULL;
    cf_error error;
    cf_result result;
    int64_t first[2];
    REQUIRE((plan = naive_pack(lengths, 2, 4)) != NULL);
    schedule = wrap_actions(plan, 0, actions, read_actions(text, actions), first);
    harness_note("%s", text);
    harness_poison(&error, sizeof error);
    result = cf_steps_make(plan, &schedule, 0, 5, NULL, &steps, &error);
    CHECK_INT(result, wanted_at == -2 ? CF_OK : CF_ERROR_SCHEDULE);
    CHECK((steps != NULL) == (result == CF_OK));
    if (wanted_at >= -1 && result == CF_ERROR_SCHEDULE) CHECK_INT(error.item, wanted_at);
    if (steps != NULL) CHECK_STR(steps_fault(plan, &schedule, &steps, 5), NULL);
    cf_steps_free(steps);
    cf_plan_free(plan);
}

TEST(backwards_may_be_split) {
    check_by_hand("F3+ I3 W3 F0 F1 F2+ I2 W2 R1+ B1 R0+ I0 W0", -2);
    check_by_hand("F0+ F1+ F2+ I2 I1 I0 W0 W1 W2 F3+ B3", -2); /* weights in any order, after the state is released */
    check_by_hand("F3+ F0+ F1+ F2+ I2 I1 B0 B3 W2 W1", -2);
}

TEST(other_orders_have_steps) {
    check_by_hand("F0 F3+ F1 F2+ B3 B2 R1+ R0+ B1 B0", -2); /* interleaved sequences; two replays before a backward */
}

TEST(impossible_actions_are_refused_where_they_stand) {
    check_by_hand("B3", 0);                                   /* nothing kept */
    check_by_hand("F3 B3", 1);
    check_by_hand("F3+ B3+", 1);                              /* a B keeps nothing */
    check_by_hand("F3+ I3 W3+", 2);
    check_by_hand("F3+ B3 B3", 2);                            /* twice */
    check_by_hand("F3+ F3+", 1);
    check_by_hand("F3 F3+", 1);
    check_by_hand("R3+ B3", 0);                               /* replay without a forward */
    check_by_hand("F3+ R3+ B3", 1);                           /* replay of a kept chunk */
    check_by_hand("F3 R3 B3", 1);                             /* replay that keeps nothing */
    check_by_hand("F3+ B3 R3+", 2);                           /* replay after the backward */
    check_by_hand("F1+", 0);                                  /* no prefix */
    check_by_hand("F0+ F2+", 1);
    /* third pass in ascending order, as printed in the paper */
    check_by_hand("F0 F1 F2+ B2 R0+ B0", 5);
    check_by_hand("F0+ F1+ F2+ B1", 3);                       /* before the backward of a later chunk */
    check_by_hand("F0+ F1+ F2+ B0", 3);
    check_by_hand("F3+ W3", 1);                               /* W without I */
    check_by_hand("F3+ I3 I3", 2);
    check_by_hand("F3+ I3 B3", 2);
    check_by_hand("F3+ I3 W3 W3", 3);
    check_by_hand("F3+ B3 W3", 2);
    check_by_hand("F0+ F1+ F2+ W2", 3);
}

/* dK and dV of a chunk are not complete while a later chunk of its chain has not even run its forward. */
TEST(a_backward_before_later_forwards_is_refused) {
    check_by_hand("F0+ B0", 1);
    check_by_hand("F0+ F1+ B1 B0", 2);
    check_by_hand("F0+ F1+ I1", 2);
}

TEST(slots_left_in_use_are_an_error) {
    check_by_hand("F3+", -1);
    check_by_hand("F0 F1 F2", -1);
    check_by_hand("F3+ I3", -1);
    check_by_hand("F0 F1 F2+ B2 R1+ B1 F3+ B3", -1); /* chunk 0 is forgotten: its state is still held */
}

/* The record has their number: two chunks, and the state of the chain of one of them. */
TEST(slots_left_in_use_are_counted) {
    const int64_t lengths[] = {12, 4};
    cf_plan *plan = NULL;
    cf_action actions[40];
    cf_schedule schedule;
    cf_steps *steps = NULL;
    cf_error error;
    int64_t first[2];
    REQUIRE((plan = naive_pack(lengths, 2, 4)) != NULL);
    schedule = wrap_actions(plan, 0, actions, read_actions("F3+ F0+", actions), first);
    harness_poison(&error, sizeof error);
    CHECK_INT(cf_steps_make(plan, &schedule, 0, 0, NULL, &steps, &error), CF_ERROR_SCHEDULE);
    CHECK(steps == NULL);
    CHECK_INT(error.wanted, 0);
    CHECK_INT(error.got, 3);
    cf_plan_free(plan);
}

/* A chunk without a backward has not been trained; no chunk may be left out silently. */
TEST(a_chunk_left_out_is_an_error) {
    check_by_hand("", -1);
    check_by_hand("F3", -1);
    check_by_hand("F3+ B3", -1);
    check_by_hand("F0 F1 F2+ B2 R1+ B1 R0+ B0", -1);
    check_by_hand("F3 F0 F1 F2+ B2 R1+ B1 R0+ B0", -1);
}

static void damage_actions(harness_rng *rng, const cf_plan *plan, cf_action *actions, int64_t *n) {
    static const uint8_t passes[] = {CF_F, CF_R, CF_B, CF_I, CF_W, CF_PASS_COUNT, 255};
    static const int32_t chunks[] = {-1, INT32_MAX, INT32_MIN};
    int64_t a = harness_between(rng, 0, *n - 1), b = harness_between(rng, 0, *n - 1);
    cf_action swap = actions[a];
    switch (harness_between(rng, 0, 8)) {
        case 8: /* flags that say nothing */
            if (harness_chance(rng, 0.5)) actions[a].reserved = 256;
            else actions[a].keep = 2;
            break;
        case 0: actions[a].pass = passes[harness_between(rng, 0, COUNT(passes) - 1)]; break;
        case 1: actions[a].keep = (uint8_t)!actions[a].keep; break;
        case 2: actions[a].chunk = (int32_t)harness_between(rng, -1, plan->n_chunks); break;
        case 3: actions[a].chunk = chunks[harness_between(rng, 0, COUNT(chunks) - 1)]; break;
        case 4: actions[a].stage = harness_chance(rng, 0.5) ? 1 : harness_chance(rng, 0.5) ? -1 : INT32_MAX; break;
        case 5: /* one too few */
            memmove(actions + a, actions + a + 1, (size_t)(*n - a - 1) * sizeof *actions);
            --*n;
            break;
        case 6: /* one twice */
            memmove(actions + a + 1, actions + a, (size_t)(*n - a) * sizeof *actions);
            ++*n;
            break;
        default:
            actions[a] = actions[b];
            actions[b] = swap;
            break;
    }
}

TEST(damaged_schedules_are_judged_as_by_the_books) {
    static cf_action actions[MOST_ACTIONS];
    int i, refused = 0, open = 0, good = 0;
    for (i = 0; i < 4000; i++) {
        uint64_t seed = 60000000 + (uint64_t)i;
        fixture f = draw_fixture(seed, 8);
        harness_rng rng = {seed * 31 + 7};
        cf_schedule schedule;
        cf_steps *steps = NULL;
        cf_error error;
        cf_result result;
        books *judge;
        cf_action *exact;
        int64_t n, count = harness_between(&rng, 1, 3), wanted, first[2];
        if (!f.plan) continue;
        n = f.schedule->n_actions;
        memcpy(actions, f.schedule->actions, (size_t)n * sizeof *actions);
        for (; count > 0 && n > 0; count--) damage_actions(&rng, f.plan, actions, &n);
        exact = (cf_action *)malloc((size_t)n * sizeof *exact + 1); /* so that the sanitizer sees a read past the end */
        judge = new_books(f.plan, f.schedule->shape.rank);
        REQUIRE(judge && exact);
        memcpy(exact, actions, (size_t)n * sizeof *exact);
        wanted = book_all(judge, exact, n);
        schedule = wrap_actions(f.plan, f.schedule->shape.rank, exact, n, first);
        harness_poison(&error, sizeof error);
        result = cf_steps_make(f.plan, &schedule, 0, seed, NULL, &steps, &error);
        CHECK((steps != NULL) == (result == CF_OK));
        if (wanted >= 0) {
            CHECK_INT(result, CF_ERROR_SCHEDULE);
            if (result == CF_ERROR_SCHEDULE) CHECK_INT(error.item, wanted);
            refused++;
        } else if (books_are_open(judge)) {
            CHECK_INT(result, CF_ERROR_SCHEDULE);
            if (result == CF_ERROR_SCHEDULE) CHECK_INT(error.item, -1);
            open++;
        } else if (steps != NULL) {
            CHECK_STR(steps_fault(f.plan, &schedule, &steps, seed), NULL);
            good++;
        }
        cf_steps_free(steps);
        free(exact);
        free(judge);
        drop_fixture(&f);
    }
    harness_report("%d refused, %d incomplete, %d good", refused, open, good);
    CHECK(refused > 1500);
    CHECK(good > 100);
}

/* ---- memory ---- */

TEST(steps_need_exactly_what_steps_size_says) {
    int i, judged = 0;
    for (i = 0; i < 300; i++) {
        fixture f = draw_fixture(70000000 + (uint64_t)i, 20);
        cf_steps *made = NULL;
        size_t need = 0;
        int64_t extra;
        if (!f.plan) continue;
        REQUIRE(cf_steps_size(f.plan, f.schedule, 0, &need, NULL) == CF_OK);
        REQUIRE(cf_steps_make(f.plan, f.schedule, 0, 3, NULL, &made, NULL) == CF_OK);
        for (extra = -1; extra <= 1; extra++) {
            size_t bytes = (size_t)((int64_t)need + extra);
            void *memory = extra == 0 ? malloc(bytes) : harness_guard_new(bytes);
            cf_steps *steps = NULL;
            cf_error error;
            if (extra < 0) {
                CHECK_INT(cf_steps_into(f.plan, f.schedule, 0, 3, memory, bytes, &steps, &error), CF_ERROR_SPACE);
                CHECK_STR(error.field, "bytes");
                CHECK_INT(error.wanted, need);
                CHECK_INT(error.got, bytes);
                CHECK(steps == NULL);
                CHECK_POISON(memory, bytes);
            } else {
                CHECK_INT(cf_steps_into(f.plan, f.schedule, 0, 3, memory, bytes, &steps, &error), CF_OK);
                REQUIRE(steps != NULL && (void *)steps == memory && steps->n == made->n);
                CHECK(memcmp(steps->steps, made->steps, (size_t)made->n * sizeof *made->steps) == 0);
                CHECK(memcmp(steps->paths, made->paths, (size_t)made->n_paths * sizeof *made->paths) == 0);
                cf_steps_free(steps); /* does nothing */
            }
            if (extra == 0) free(memory);
            else harness_guard_free(memory);
        }
        cf_steps_free(made);
        judged++;
        drop_fixture(&f);
    }
    CHECK(judged > 200);
}

/* Whichever allocation fails, nothing is made and nothing leaks. */
TEST(steps_survive_failing_allocations) {
    fixture f = known_fixture(2);
    int64_t fail_at;
    for (fail_at = 0;; fail_at++) {
        harness_heap heap = {0};
        cf_allocator allocator = {harness_alloc, harness_release, NULL};
        cf_steps *steps = NULL;
        cf_error error;
        cf_result result;
        allocator.user = &heap;
        heap.fail_at = fail_at + 1;
        result = cf_steps_make(f.plan, f.schedule, 0, 0, &allocator, &steps, &error);
        if (result == CF_OK) {
            cf_steps_free(steps);
            CHECK_INT(heap.live, 0);
            break;
        }
        CHECK_INT(result, CF_ERROR_MEMORY);
        CHECK(steps == NULL);
        CHECK_INT(heap.live, 0);
    }
    CHECK_INT(fail_at, 2); /* working space, and the steps */
    drop_fixture(&f);
}

/* ---- arguments ---- */

TEST(steps_refuse_bad_arguments) {
    const int64_t bad_stages[] = {-1, 1, INT64_MAX, INT64_MIN};
    fixture f = known_fixture(2);
    cf_steps *steps = NULL;
    cf_error error;
    size_t bytes;
    int64_t i;
    REQUIRE(f.plan && f.schedule);
    harness_poison(&bytes, sizeof bytes);
    CHECK_INT(cf_steps_make(NULL, f.schedule, 0, 0, NULL, &steps, &error), CF_ERROR_ARGUMENT);
    CHECK_STR(error.field, "plan");
    CHECK_INT(cf_steps_make(f.plan, NULL, 0, 0, NULL, &steps, &error), CF_ERROR_ARGUMENT);
    CHECK_STR(error.field, "schedule");
    CHECK_INT(cf_steps_make(f.plan, f.schedule, 0, 0, NULL, NULL, &error), CF_ERROR_ARGUMENT);
    CHECK_STR(error.field, "out");
    for (i = 0; i < COUNT(bad_stages); i++) {
        harness_note("stage %lld", (long long)bad_stages[i]);
        CHECK_INT(cf_steps_make(f.plan, f.schedule, bad_stages[i], 0, NULL, &steps, &error), CF_ERROR_ARGUMENT);
        CHECK_STR(error.field, "stage");
        CHECK_INT(error.got, bad_stages[i]);
    }
    harness_note("%s", "");
    CHECK_INT(cf_steps_into(f.plan, f.schedule, 0, 0, NULL, 100, &steps, &error), CF_ERROR_ARGUMENT);
    CHECK_STR(error.field, "memory");
    CHECK_INT(cf_steps_into(f.plan, f.schedule, 0, 0, NULL, 100, NULL, &error), CF_ERROR_ARGUMENT);
    CHECK_STR(error.field, "out");
    CHECK(steps == NULL);
    CHECK_INT(cf_steps_size(NULL, f.schedule, 0, &bytes, &error), CF_ERROR_ARGUMENT);
    CHECK_STR(error.field, "plan");
    CHECK_INT(cf_steps_size(f.plan, NULL, 0, &bytes, &error), CF_ERROR_ARGUMENT);
    CHECK_STR(error.field, "schedule");
    CHECK_INT(cf_steps_size(f.plan, f.schedule, 0, NULL, &error), CF_ERROR_ARGUMENT);
    CHECK_STR(error.field, "bytes");
    CHECK_POISON(&bytes, sizeof bytes);
    cf_steps_free(NULL);
    drop_fixture(&f);
}

/* ---- standalone chunks that are replayed ---- */

/* Checks that a replay has its forward's seed, so that it repeats it exactly. Returns the number of replays. */
static int64_t count_replays(const cf_steps *steps) {
    uint64_t seeds[16] = {0};
    int64_t slots[16], i, n = 0;
    for (i = 0; i < steps->n; i++) {
        const cf_step *step = &steps->steps[i];
        const int32_t chunk = step->action.chunk;
        if (step->action.pass == CF_B) {
            CHECK(step->slot >= 0 && step->slot == slots[chunk]);
            continue;
        }
        CHECK_INT(step->slot >= 0, step->action.keep);
        if (step->action.pass == CF_R) {
            CHECK(step->seed == seeds[chunk]);
            CHECK_INT(slots[chunk], -1);
            n++;
        }
        seeds[chunk] = step->seed;
        slots[chunk] = step->slot;
    }
    return n;
}

/* `best` may drop any chunk on only some of the stages, which makes schedules shorter under a limit. */
static void check_drops(int64_t n_stages, int64_t limit) {
    const int64_t lengths[] = {16, 9, 7, 16, 12, 15, 16, 14};
    cf_pack_desc pack = {0};
    cf_schedule_desc order = {0};
    fixture f = {NULL, NULL};
    int64_t s, all = 0, last = 0;
    pack.chunk_size = 16;
    order.shape.n_stages = n_stages;
    order.limits.chunks = limit;
    harness_note("%d stages, limit %d", (int)n_stages, (int)limit);
    CHECK_INT(cf_pack(lengths, COUNT(lengths), &pack, &f.plan, NULL), CF_OK);
    CHECK_INT(f.plan->n_chains, 0);
    CHECK_INT(cf_schedule_make(f.plan, &order, &f.schedule, NULL), CF_OK);
    REQUIRE(f.schedule != NULL);
    CHECK_INT(cf_schedule_validate(f.plan, f.schedule, NULL, NULL, NULL), CF_OK);
    for (s = 0; s < n_stages; s++) {
        cf_steps *steps = NULL;
        REQUIRE(cf_steps_make(f.plan, f.schedule, s, 42, NULL, &steps, NULL) == CF_OK);
        CHECK(steps->n_slots <= limit);
        last = count_replays(steps);
        all += last;
        cf_steps_free(steps);
    }
    CHECK(all > 0);
    CHECK_INT(last, 0); /* the last stage waits for no other stage */
    harness_note("%s", "");
    drop_fixture(&f);
}

TEST(standalone_chunks_are_replayed) {
    int64_t n_stages;
    for (n_stages = 2; n_stages <= 4; n_stages++) check_drops(n_stages, 1);
    check_drops(6, 2);
}

TEST(an_empty_plan_has_no_steps) {
    cf_pack_desc pack = {0};
    cf_schedule_desc order = {0};
    fixture f = {NULL, NULL};
    cf_steps *steps = NULL;
    pack.chunk_size = 8;
    REQUIRE(cf_pack(NULL, 0, &pack, &f.plan, NULL) == CF_OK);
    REQUIRE(cf_schedule_make(f.plan, &order, &f.schedule, NULL) == CF_OK);
    REQUIRE(cf_steps_make(f.plan, f.schedule, 0, 0, NULL, &steps, NULL) == CF_OK);
    CHECK(steps->n == 0 && steps->n_paths == 0 && steps->n_slots == 0 && steps->n_states == 0);
    cf_steps_free(steps);
    drop_fixture(&f);
}

SUITE(steps, CASE(counts_by_hand), CASE(capacities_are_high_water_marks),
      CASE(a_capacity_is_raised_only_where_all_is_well), CASE(a_capacity_is_not_read_past_the_plan),
      CASE(a_seed_belongs_to_chunk_and_stage), CASE(backwards_may_be_split), CASE(other_orders_have_steps),
      CASE(impossible_actions_are_refused_where_they_stand),
      CASE(a_backward_before_later_forwards_is_refused), CASE(slots_left_in_use_are_an_error),
      CASE(slots_left_in_use_are_counted), CASE(a_chunk_left_out_is_an_error),
      CASE(damaged_schedules_are_judged_as_by_the_books), CASE(steps_need_exactly_what_steps_size_says),
      CASE(steps_survive_failing_allocations), CASE(steps_refuse_bad_arguments), CASE(standalone_chunks_are_replayed),
      CASE(an_empty_plan_has_no_steps));
