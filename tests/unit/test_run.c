/* >>run: the interpreter. A second set of books is kept here, from the words of the header, and compared with what
   cf_run tells its callbacks and reports at the end - for good schedules, for damaged ones, and when a callback
   stops it. */

#include "chunkflow.h"
#include "../harness.h"
#include "../reference/naive.h"
#include "../reference/oracle.h"

#include <stddef.h>
#include <stdlib.h>
#include <string.h>

#define MOST_CHUNKS 400
#define MOST_ACTIONS (3 * MOST_CHUNKS + 10)

/* ---- the second set of books ---- */

typedef struct chunk_book {
    int forwarded, kept, backward; /* backward: 0 none, 1 the half I, 2 whole */
} chunk_book;

typedef struct books {
    const cf_plan *plan;
    int64_t rank;
    chunk_book chunks[MOST_CHUNKS];
    int state_held[MOST_CHUNKS];
    int64_t slots, tokens, states, all_state_tokens;
    cf_run_stats stats;
} books;

static void raise_to(int64_t *peak, int64_t value) {
    if (value > *peak) *peak = value;
}

static int64_t own_tokens(const cf_plan *plan, const cf_chunk *chunk) {
    return chunk->group < 0 ? 0 : plan->slices[chunk->first_slice].length;
}

/* dK and dV of a chunk are complete when every later chunk of its group has run its backward. */
static int later_chunks_are_done(const books *b, const cf_chunk *chunk) {
    int64_t i;
    const cf_group *group;
    if (chunk->group < 0) return 1;
    group = &b->plan->groups[chunk->group];
    for (i = chunk->index + 1; i < group->n_chunks; i++)
        if (!b->chunks[group->first_chunk + i].backward) return 0;
    return 1;
}

static int earlier_chunks_are_held(const books *b, const cf_chunk *chunk) {
    int64_t i;
    const cf_group *group;
    if (chunk->group < 0) return 1;
    group = &b->plan->groups[chunk->group];
    for (i = 0; i < chunk->index; i++) {
        const chunk_book *earlier = &b->chunks[group->first_chunk + i];
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

/* What the action takes before its callback runs. */
static void book_start(books *b, const cf_action *a) {
    const cf_chunk *chunk = &b->plan->chunks[a->chunk];
    chunk_book *book = &b->chunks[a->chunk];
    if (a->pass != CF_F && a->pass != CF_R) return;
    if (chunk->group >= 0 && !b->state_held[chunk->group]) {
        b->state_held[chunk->group] = 1;
        b->states++;
    }
    if (a->keep) {
        book->kept = 1;
        b->slots++;
        b->tokens += chunk->padded;
    }
    raise_to(&b->stats.peak_states, b->states);
    raise_to(&b->stats.peak_slots, b->slots);
    raise_to(&b->stats.peak_tokens, b->tokens);
}

/* What it has changed when its callback has returned. */
static void book_end(books *b, const cf_action *a) {
    const cf_chunk *chunk = &b->plan->chunks[a->chunk];
    chunk_book *book = &b->chunks[a->chunk];
    int64_t own = own_tokens(b->plan, chunk);
    b->stats.done++;
    if (a->pass == CF_F) {
        book->forwarded = 1;
        b->all_state_tokens += own;
        raise_to(&b->stats.peak_state_tokens, b->all_state_tokens);
    }
    if (a->pass == CF_B || a->pass == CF_I) {
        book->backward = a->pass == CF_I ? 1 : 2;
        b->all_state_tokens -= own;
        if (chunk->group >= 0 && chunk->index == 0) {
            b->state_held[chunk->group] = 0;
            b->states--;
        }
    }
    if (a->pass == CF_W) book->backward = 2;
    if (a->pass == CF_B || a->pass == CF_W) {
        book->kept = 0;
        b->slots--;
        b->tokens -= chunk->padded;
    }
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

/* Position of the first impossible action, or -1. Leaves the books as they stand there. */
static int64_t book_all(books *b, const cf_action *actions, int64_t n) {
    int64_t i;
    for (i = 0; i < n; i++) {
        if (!action_is_possible(b, &actions[i])) return i;
        book_start(b, &actions[i]);
        book_end(b, &actions[i]);
    }
    return -1;
}

/* Whether some chunk of the rank has not been trained, or a slot is still in use. */
static int books_are_open(const books *b) {
    int64_t i;
    for (i = 0; i < b->plan->n_chunks; i++)
        if (b->plan->chunks[i].rank == b->rank && b->chunks[i].backward != 2) return 1;
    return b->slots != 0 || b->states != 0;
}

static void check_stats(const cf_run_stats *got, const cf_run_stats *wanted) {
    CHECK_INT(got->done, wanted->done);
    CHECK_INT(got->peak_slots, wanted->peak_slots);
    CHECK_INT(got->peak_tokens, wanted->peak_tokens);
    CHECK_INT(got->peak_states, wanted->peak_states);
    CHECK_INT(got->peak_state_tokens, wanted->peak_state_tokens);
}

/* ---- a host that watches ---- */

typedef struct host {
    books *b;
    const cf_schedule *schedule;
    int64_t position;                     /* of the action that must come next */
    int64_t owner[2][MOST_CHUNKS];        /* of each slot in use, -1 where free; by resource */
    int64_t stage_of[2][MOST_CHUNKS];     /* the virtual stage that each slot in use is for */
    int64_t highest[2];                   /* highest slot number seen */
    int64_t live[2], acquired, released;
    int64_t slot_of_chunk[MOST_CHUNKS];
    uint64_t seed, seeds[MOST_CHUNKS];
    int seed_known[MOST_CHUNKS];
    int64_t fail_pass_at, fail_acquire_at, cancel_at; /* position, call and position, -1: never */
    int64_t acquire_calls, progress_calls;
    int failed;                           /* no pass may be called any more */
} host;

static host *new_host(books *b, const cf_schedule *schedule) {
    host *h = (host *)calloc(1, sizeof *h);
    int64_t i;
    CHECK(h != NULL);
    if (!h) return NULL;
    h->b = b;
    h->schedule = schedule;
    h->fail_pass_at = h->fail_acquire_at = h->cancel_at = -1;
    for (i = 0; i < MOST_CHUNKS; i++) h->owner[0][i] = h->owner[1][i] = -1;
    return h;
}

/* The rows that a slot must hold: as many as a chunk's tensors have, or the keys of any chunk of a group. */
static int64_t rows_wanted(const cf_plan *plan, cf_resource what, int64_t owner) {
    int64_t i, most = 0;
    if (what != CF_RESOURCE_STATE) return plan->chunks[owner].padded;
    for (i = 0; i < plan->n_chunks; i++)
        if (plan->chunks[i].group == owner) raise_to(&most, plan->chunks[i].prefix + plan->chunks[i].padded);
    return most;
}

static int host_acquire(void *user, const cf_slot *taken) {
    host *h = (host *)user;
    const cf_resource what = taken->what;
    const int64_t slot = taken->slot, owner = taken->owner, stage = taken->stage;
    CHECK_INT(taken->rows, rows_wanted(h->b->plan, what, owner));
    CHECK(!h->failed);
    CHECK(what == CF_RESOURCE_ACTIVATIONS || what == CF_RESOURCE_STATE);
    CHECK(slot >= 0 && slot < MOST_CHUNKS);
    CHECK_INT(h->owner[what][slot], -1); /* nobody else has it */
    if (h->acquire_calls++ == h->fail_acquire_at) {
        h->failed = 1;
        return 55;
    }
    CHECK_INT(stage, h->schedule->actions[h->position].stage);
    h->owner[what][slot] = owner;
    h->stage_of[what][slot] = stage;
    raise_to(&h->highest[what], slot);
    h->live[what]++;
    h->acquired++;
    if (what == CF_RESOURCE_ACTIVATIONS) h->slot_of_chunk[owner] = slot;
    return 0;
}

static void host_release(void *user, const cf_slot *freed) {
    host *h = (host *)user;
    const cf_resource what = freed->what;
    const int64_t slot = freed->slot, owner = freed->owner, stage = freed->stage;
    CHECK_INT(freed->rows, rows_wanted(h->b->plan, what, owner));
    CHECK(slot >= 0 && slot < MOST_CHUNKS && owner >= 0);
    CHECK_INT(h->owner[what][slot], owner);
    CHECK_INT(h->stage_of[what][slot], stage);
    h->owner[what][slot] = -1;
    h->live[what]--;
    h->released++;
}

static void check_step(host *h, const cf_step *step) {
    const cf_plan *plan = h->b->plan;
    const cf_action *a = &h->schedule->actions[h->position];
    const cf_chunk *chunk = &plan->chunks[a->chunk];
    CHECK(!h->failed);
    CHECK(step->plan == plan && step->schedule == h->schedule && step->chunk == chunk);
    CHECK(memcmp(&step->action, a, sizeof *a) == 0);
    CHECK_INT(step->position, h->position);
    if (h->b->chunks[a->chunk].kept) {
        CHECK_INT(step->slot, h->slot_of_chunk[a->chunk]);
        CHECK_INT(h->owner[CF_RESOURCE_ACTIVATIONS][step->slot], a->chunk);
    } else {
        CHECK_INT(step->slot, -1);
    }
    if (chunk->group >= 0 && a->pass != CF_W) {
        REQUIRE(step->state >= 0 && step->state < MOST_CHUNKS);
        CHECK_INT(h->owner[CF_RESOURCE_STATE][step->state], chunk->group);
    } else if (chunk->group < 0) {
        CHECK_INT(step->state, -1);
    }
    CHECK(step->seed == cf_chunk_seed(h->seed, a->chunk, a->stage));
    if (h->seed_known[a->chunk]) CHECK(step->seed == h->seeds[a->chunk]);
    h->seeds[a->chunk] = step->seed;
    h->seed_known[a->chunk] = 1;
}

static int host_pass(host *h, const cf_step *step, int forward) {
    const cf_action *a = &h->schedule->actions[h->position];
    CHECK_INT(forward, a->pass == CF_F || a->pass == CF_R);
    book_start(h->b, a);
    CHECK_INT(h->live[CF_RESOURCE_ACTIVATIONS], h->b->slots);
    CHECK_INT(h->live[CF_RESOURCE_STATE], h->b->states);
    check_step(h, step);
    if (h->position == h->fail_pass_at) {
        h->failed = 1;
        return -77;
    }
    book_end(h->b, a);
    h->position++;
    return 0;
}

static int host_forward(void *user, const cf_step *step) {
    return host_pass((host *)user, step, 1);
}

static int host_backward(void *user, const cf_step *step) {
    return host_pass((host *)user, step, 0);
}

static int host_progress(void *user, const cf_progress *progress) {
    host *h = (host *)user;
    CHECK(!h->failed);
    CHECK_INT(progress->done, h->position);
    CHECK_INT(progress->total, h->schedule->n_actions);
    CHECK(progress->step != NULL && progress->step->position == h->position - 1);
    CHECK_INT(progress->live_slots, h->b->slots);
    CHECK_INT(progress->live_state_tokens, h->b->all_state_tokens);
    CHECK_INT(h->live[CF_RESOURCE_ACTIVATIONS], h->b->slots); /* released by now */
    CHECK_INT(h->live[CF_RESOURCE_STATE], h->b->states);
    h->progress_calls++;
    if (progress->done - 1 == h->cancel_at) {
        h->failed = 1;
        return 66;
    }
    return 0;
}

static cf_run_desc desc_of(host *h) {
    cf_run_desc desc = {0};
    desc.user = h;
    desc.forward = host_forward;
    desc.backward = host_backward;
    desc.acquire = host_acquire;
    desc.release = host_release;
    desc.progress = host_progress;
    desc.seed = h->seed;
    return desc;
}

static void check_all_released(const host *h) {
    CHECK_INT(h->live[0], 0);
    CHECK_INT(h->live[1], 0);
    CHECK_INT(h->acquired, h->released);
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

/* NULL plan where the batch is too large for the books. */
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

/* A group of five chunks and two standalone ones. */
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

TEST(callbacks_and_counts_of_random_schedules) {
    int i, judged = 0;
    for (i = 0; i < 1500; i++) {
        fixture f = draw_fixture(50000000 + (uint64_t)i, 25);
        cf_run_desc desc;
        cf_run_stats stats, dry;
        cf_error error;
        books *b;
        host *h;
        if (!f.plan) continue;
        b = new_books(f.plan, f.schedule->shape.rank);
        h = new_host(b, f.schedule);
        REQUIRE(b && h);
        h->seed = 1234567 + (uint64_t)i;
        desc = desc_of(h);
        harness_poison(&stats, sizeof stats);
        harness_poison(&error, sizeof error);
        CHECK_INT(cf_run(f.plan, f.schedule, 0, &desc, &stats, &error), CF_OK);
        CHECK_POISON(&error, sizeof error);
        CHECK_INT(h->position, f.schedule->n_actions);
        CHECK_INT(h->progress_calls, f.schedule->n_actions);
        CHECK(!books_are_open(b));
        check_stats(&stats, &b->stats);
        check_all_released(h);
        /* slots are small numbers: the highest is the peak */
        if (stats.peak_slots > 0) CHECK_INT(h->highest[CF_RESOURCE_ACTIVATIONS], stats.peak_slots - 1);
        if (stats.peak_states > 0) CHECK_INT(h->highest[CF_RESOURCE_STATE], stats.peak_states - 1);
        CHECK(stats.peak_slots <= f.schedule->shape.k);
        CHECK(stats.peak_tokens <= f.schedule->shape.k * f.plan->chunk_size);
        /* a dry run counts the same */
        harness_poison(&dry, sizeof dry);
        CHECK_INT(cf_run(f.plan, f.schedule, 0, NULL, &dry, NULL), CF_OK);
        check_stats(&dry, &stats);
        CHECK_INT(cf_run(f.plan, f.schedule, 0, NULL, NULL, NULL), CF_OK);
        judged++;
        free(h);
        free(b);
        drop_fixture(&f);
    }
    CHECK(judged > 1000);
}

TEST(counts_by_hand) {
    /* 38 tokens in chunks of 8: 8 8 8 8 6, and 2 more in the last; then 8, 7, 5 alone */
    const int64_t slots[] = {1, 2, 3, 4, 5, 5};
    const int64_t tokens[] = {8, 16, 24, 32, 40, 40};
    int64_t k;
    for (k = 1; k <= 6; k++) {
        fixture f = known_fixture(k);
        cf_run_desc desc;
        cf_run_stats stats;
        REQUIRE(f.plan && f.schedule);
        memset(&desc, 0, sizeof desc);
        CHECK_INT(f.plan->n_chunks, 8);
        CHECK_INT(cf_run(f.plan, f.schedule, 0, &desc, &stats, NULL), CF_OK);
        CHECK_INT(stats.peak_slots, slots[k - 1]);
        CHECK_INT(stats.peak_tokens, tokens[k - 1]);
        CHECK_INT(stats.peak_states, 1);
        CHECK_INT(stats.peak_state_tokens, 38);
        CHECK_INT(stats.done, f.schedule->n_actions);
        drop_fixture(&f);
    }
}

/* Buffers for many batches: of each member the largest that any of them needs, found chunk by chunk. */
TEST(capacities_are_high_water_marks) {
    static oracle_batch batch;
    cf_capacity most = {0, 0, 0, 0, 0, 0}, wanted = {0, 0, 0, 0, 0, 0};
    int i;
    for (i = 0; i < 300; i++) {
        harness_rng rng = {43000000 + (uint64_t)i};
        cf_plan *plan = NULL;
        cf_schedule *schedule = NULL;
        cf_schedule_desc order;
        cf_run_stats stats;
        int64_t c, j;
        oracle_draw(&rng, &batch, 12);
        memset(&order, 0, sizeof order);
        order.kind = CF_SCHEDULE_PAPER;
        order.shape.k = harness_between(&rng, 1, 3);
        REQUIRE(cf_pack(batch.lengths, batch.n, &batch.desc, &plan, NULL) == CF_OK);
        REQUIRE(cf_schedule_make(plan, &order, &schedule, NULL) == CF_OK);
        REQUIRE(cf_run(plan, schedule, 0, NULL, &stats, NULL) == CF_OK);
        for (c = 0; c < plan->n_chunks; c++) {
            const cf_chunk *chunk = &plan->chunks[c];
            int64_t n_seqs = chunk->n_slices + 1; /* there may be padding behind the last slice ... */
            for (j = 0; j + 1 < chunk->n_slices; j++) {
                const cf_slice *s = &plan->slices[chunk->first_slice + j];
                n_seqs += s->offset + s->length < s[1].offset; /* ... and there is padding behind this one */
            }
            raise_to(&wanted.rows, chunk->padded);
            raise_to(&wanted.prefix, chunk->prefix);
            CHECK(n_seqs <= (plan->align > 1 ? 2 * chunk->n_slices + (chunk->n_slices == 0) : chunk->n_slices + 1));
            raise_to(&wanted.n_seqs, plan->align > 1 && chunk->n_slices > 0 ? 2 * chunk->n_slices : n_seqs);
        }
        raise_to(&wanted.slots, stats.peak_slots);
        raise_to(&wanted.states, stats.peak_states);
        CHECK_INT(cf_run_capacity(plan, schedule, 0, &most, NULL), CF_OK);
        CHECK(most.rows == wanted.rows && most.prefix == wanted.prefix && most.n_seqs == wanted.n_seqs);
        CHECK(most.slots == wanted.slots && most.states == wanted.states && most.boundaries == 0);
        cf_schedule_free(schedule);
        cf_plan_free(plan);
    }
}

TEST(a_capacity_is_raised_only_where_all_is_well) {
    fixture f = known_fixture(2);
    cf_capacity most, poison;
    cf_error error;
    REQUIRE(f.plan && f.schedule);
    harness_poison(&most, sizeof most);
    poison = most;
    CHECK_INT(cf_run_capacity(NULL, f.schedule, 0, &most, &error), CF_ERROR_ARGUMENT);
    CHECK_STR(error.field, "plan");
    CHECK_INT(cf_run_capacity(f.plan, f.schedule, 0, NULL, &error), CF_ERROR_ARGUMENT);
    CHECK_STR(error.field, "capacity");
    CHECK_INT(cf_run_capacity(f.plan, f.schedule, 1, &most, &error), CF_ERROR_ARGUMENT);
    CHECK_STR(error.field, "stage");
    f.schedule->actions[1].pass = CF_B;
    CHECK_INT(cf_run_capacity(f.plan, f.schedule, 0, &most, &error), CF_ERROR_SCHEDULE);
    CHECK(memcmp(&most, &poison, sizeof most) == 0);
    memset(&most, 0, sizeof most);
    CHECK_INT(cf_run_capacity(f.plan, NULL, 99, &most, &error), CF_OK); /* no schedule, so no stage */
    CHECK(most.rows == 8 && most.prefix == 32 && most.n_seqs == 3 && most.slots == 0 && most.states == 0);
    drop_fixture(&f);
}

/* Without a schedule nothing has looked at the plan before, and with one nobody at other ranks' chunks. */
TEST(a_capacity_is_not_read_past_the_plan) {
    static const struct {
        const char *field;
        size_t offset; /* of the member that is damaged */
        int64_t value;
    } cases[] = {{"chunks.first_slice", offsetof(cf_chunk, first_slice), -1},
                 {"chunks.first_slice", offsetof(cf_chunk, first_slice), INT64_MAX},
                 {"chunks.n_slices", offsetof(cf_chunk, n_slices), -1},
                 {"chunks.n_slices", offsetof(cf_chunk, n_slices), INT64_MAX},
                 {"chunks.group", offsetof(cf_chunk, group), INT64_MAX},
                 {"chunks.index", offsetof(cf_chunk, index), INT64_MAX},
                 {"chunks.index", offsetof(cf_chunk, index), -1},
                 {"chunks.prefix", offsetof(cf_chunk, prefix), INT64_MAX},
                 {"chunks.prefix", offsetof(cf_chunk, prefix), -1},
                 {"chunks.padded", offsetof(cf_chunk, padded), -1}};
    fixture f = known_fixture(2);
    size_t i;
    REQUIRE(f.plan && f.plan->n_groups > 0);
    for (i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        unsigned char *chunk = (unsigned char *)&f.plan->chunks[f.plan->groups[0].first_chunk + 1];
        int64_t *damaged = (int64_t *)(void *)(chunk + cases[i].offset), sound = *damaged;
        cf_capacity most, poison;
        cf_error error;
        harness_poison(&most, sizeof most);
        poison = most;
        *damaged = cases[i].value;
        CHECK_INT(cf_run_capacity(f.plan, NULL, 0, &most, &error), CF_ERROR_PLAN);
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
    CHECK(ones > n * 32 - n && ones < n * 32 + n); /* half the bits, give or take far more than chance would */
    CHECK(cf_chunk_seed(42, 7, 3) == cf_chunk_seed(42, 7, 3));
    CHECK(cf_chunk_seed(42, 7, 3) != cf_chunk_seed(43, 7, 3));
    CHECK(cf_chunk_seed(42, 7, 3) != cf_chunk_seed(42, 3, 7));
    CHECK(cf_chunk_seed(0, 0, 0) != 0);
}

/* ---- callbacks that stop the run ---- */

static void check_stopped(fixture *f, host *h, cf_result code, int64_t item, int64_t got) {
    cf_run_desc desc = desc_of(h);
    cf_run_stats stats;
    cf_error error;
    harness_poison(&error, sizeof error);
    harness_poison(&stats, sizeof stats);
    CHECK_INT(cf_run(f->plan, f->schedule, 0, &desc, &stats, &error), code);
    CHECK_INT(error.code, code);
    CHECK_INT(error.item, item);
    CHECK_INT(error.got, got);
    CHECK(error.field != NULL && strstr(error.text, error.field) != NULL);
    check_stats(&stats, &h->b->stats);
    check_all_released(h);
}

/* At every position a pass fails, or else the host cancels the run. An action in which it does so has ended first. */
static void check_stops_everywhere(int cancels) {
    int64_t k, at;
    for (k = 1; k <= 5; k++) {
        fixture f = known_fixture(k);
        REQUIRE(f.plan && f.schedule);
        for (at = 0; at < f.schedule->n_actions; at++) {
            books *b = new_books(f.plan, 0);
            host *h = new_host(b, f.schedule);
            REQUIRE(b && h);
            harness_note("K %lld, position %lld", (long long)k, (long long)at);
            *(cancels ? &h->cancel_at : &h->fail_pass_at) = at;
            check_stopped(&f, h, cancels ? CF_ERROR_CANCELLED : CF_ERROR_CALLBACK, at, cancels ? 66 : -77);
            CHECK_INT(b->stats.done, cancels ? at + 1 : at);
            if (!cancels) CHECK_INT(h->position, at);
            free(h);
            free(b);
        }
        drop_fixture(&f);
    }
}

TEST(an_error_in_a_pass_stops_the_run_at_every_position) { check_stops_everywhere(0); }

TEST(the_failing_callback_is_named) {
    fixture f = known_fixture(1);
    const int64_t at[] = {0, 5}; /* F, B */
    const char *const names[] = {"forward", "backward"};
    int i;
    REQUIRE(f.plan && f.schedule);
    for (i = 0; i < 2; i++) {
        books *b = new_books(f.plan, 0);
        host *h = new_host(b, f.schedule);
        cf_run_desc desc;
        cf_error error;
        REQUIRE(b && h);
        h->fail_pass_at = at[i];
        desc = desc_of(h);
        CHECK_INT(cf_run(f.plan, f.schedule, 0, &desc, NULL, &error), CF_ERROR_CALLBACK);
        CHECK_STR(error.field, names[i]);
        free(h);
        free(b);
    }
    drop_fixture(&f);
}

/* The first forward fills in its record and goes well; the second fails and says nothing. */
static int complain_then_fail(void *user, const cf_step *step) {
    int *calls = (int *)user;
    if (++*calls > 1) return 1;
    step->error->code = CF_ERROR_MEMORY;
    step->error->field = "of_another_call";
    return 0;
}

TEST(a_record_belongs_to_its_call) {
    fixture f = known_fixture(1);
    cf_run_desc desc;
    cf_error error;
    int calls = 0;
    REQUIRE(f.plan && f.schedule);
    memset(&desc, 0, sizeof desc);
    desc.user = &calls;
    desc.forward = complain_then_fail;
    CHECK_INT(cf_run(f.plan, f.schedule, 0, &desc, NULL, &error), CF_ERROR_CALLBACK);
    CHECK_STR(error.field, "forward");
    CHECK_INT(error.item, 1);
    drop_fixture(&f);
}

TEST(cancelling_works_at_every_position) { check_stops_everywhere(1); }

TEST(a_refused_slot_stops_the_run) {
    int64_t k, at, n_calls;
    for (k = 1; k <= 5; k++) {
        fixture f = known_fixture(k);
        REQUIRE(f.plan && f.schedule);
        for (at = 0, n_calls = 1; at < n_calls; at++) {
            books *b = new_books(f.plan, 0);
            host *h = new_host(b, f.schedule);
            cf_run_desc desc;
            cf_error error;
            REQUIRE(b && h);
            harness_note("K %lld, call %lld", (long long)k, (long long)at);
            h->fail_acquire_at = at;
            desc = desc_of(h);
            CHECK_INT(cf_run(f.plan, f.schedule, 0, &desc, NULL, &error), CF_ERROR_CALLBACK);
            CHECK_STR(error.field, "acquire");
            CHECK_INT(error.got, 55);
            CHECK_INT(error.item, h->position);
            CHECK_INT(h->acquire_calls, at + 1);
            CHECK_INT(h->acquired, at); /* the refused one is not released */
            check_all_released(h);
            free(h);
            free(b);
            if (at > 0) continue;
            b = new_books(f.plan, 0); /* how many calls there are in a whole run */
            h = new_host(b, f.schedule);
            REQUIRE(b && h);
            desc = desc_of(h);
            CHECK_INT(cf_run(f.plan, f.schedule, 0, &desc, NULL, NULL), CF_OK);
            n_calls = h->acquire_calls;
            free(h);
            free(b);
        }
        CHECK(n_calls >= 9); /* 8 chunks and a state */
        drop_fixture(&f);
    }
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

/* Runs a text on one group of three chunks (0, 1, 2) and one standalone chunk (3). wanted_at: -2 good, -1 refused at
   the end, else the position of the action that is refused. */
static void check_by_hand(const char *text, int64_t wanted_at) {
    const int64_t lengths[] = {12, 4};
    cf_plan *plan = NULL;
    cf_action actions[40];
    cf_schedule schedule;
    cf_run_desc desc;
    cf_error error;
    cf_result result;
    books *b;
    host *h;
    int64_t first[2];
    REQUIRE((plan = naive_pack(lengths, 2, 4)) != NULL);
    schedule = wrap_actions(plan, 0, actions, read_actions(text, actions), first);
    b = new_books(plan, 0);
    h = new_host(b, &schedule);
    REQUIRE(b && h);
    harness_note("%s", text);
    desc = desc_of(h);
    harness_poison(&error, sizeof error);
    result = cf_run(plan, &schedule, 0, &desc, NULL, &error);
    CHECK_INT(result, wanted_at == -2 ? CF_OK : CF_ERROR_SCHEDULE);
    if (wanted_at >= -1 && result == CF_ERROR_SCHEDULE) CHECK_INT(error.item, wanted_at);
    check_all_released(h);
    free(h);
    free(b);
    cf_plan_free(plan);
}

TEST(split_backwards_run) {
    check_by_hand("F3+ I3 W3 F0 F1 F2+ I2 W2 R1+ B1 R0+ I0 W0", -2);
    check_by_hand("F0+ F1+ F2+ I2 I1 I0 W0 W1 W2 F3+ B3", -2); /* weights in any order, after the state is gone */
    check_by_hand("F3+ F0+ F1+ F2+ I2 I1 B0 B3 W2 W1", -2);
}

TEST(other_orders_run) {
    check_by_hand("F0 F3+ F1 F2+ B3 B2 R1+ R0+ B1 B0", -2); /* units interleaved, two replays before a backward */
}

TEST(impossible_actions_are_refused_where_they_stand) {
    check_by_hand("B3", 0);                                   /* nothing kept */
    check_by_hand("F3 B3", 1);
    check_by_hand("F3+ B3+", 1);                              /* a B keeps nothing */
    check_by_hand("F3+ I3 W3+", 2);
    check_by_hand("F3+ B3 B3", 2);                            /* twice */
    check_by_hand("F3+ F3+", 1);
    check_by_hand("F3 F3+", 1);
    check_by_hand("R3+ B3", 0);                               /* replay of what never ran */
    check_by_hand("F3+ R3+ B3", 1);                           /* replay of what is kept */
    check_by_hand("F3 R3 B3", 1);                             /* replay that keeps nothing */
    check_by_hand("F3+ B3 R3+", 2);                           /* replay after the backward */
    check_by_hand("F1+", 0);                                  /* no prefix */
    check_by_hand("F0+ F2+", 1);
    check_by_hand("F0 F1 F2+ B2 R0+ B0", 5);                  /* ascending third pass, as printed in the paper */
    check_by_hand("F0+ F1+ F2+ B1", 3);                       /* before the backward of a later chunk */
    check_by_hand("F0+ F1+ F2+ B0", 3);
    check_by_hand("F3+ W3", 1);                               /* W without I */
    check_by_hand("F3+ I3 I3", 2);
    check_by_hand("F3+ I3 B3", 2);
    check_by_hand("F3+ I3 W3 W3", 3);
    check_by_hand("F3+ B3 W3", 2);
    check_by_hand("F0+ F1+ F2+ W2", 3);
}

/* dK and dV of a chunk are not complete while a later chunk of its group has not even run forward. */
TEST(a_backward_before_later_forwards_is_refused) {
    check_by_hand("F0+ B0", 1);
    check_by_hand("F0+ F1+ B1 B0", 2);
    check_by_hand("F0+ F1+ I1", 2);
}

TEST(slots_left_in_use_are_an_error) {
    check_by_hand("F3+", -1);
    check_by_hand("F0 F1 F2", -1);
    check_by_hand("F3+ I3", -1);
    check_by_hand("F0 F1 F2+ B2 R1+ B1 F3+ B3", -1); /* chunk 0 forgotten: its state is still held */
}

/* The record counts them: two chunks, and the state of the group that one of them belongs to. */
TEST(slots_left_in_use_are_counted) {
    const int64_t lengths[] = {12, 4};
    cf_plan *plan = NULL;
    cf_action actions[40];
    cf_schedule schedule;
    cf_error error;
    int64_t first[2];
    REQUIRE((plan = naive_pack(lengths, 2, 4)) != NULL);
    schedule = wrap_actions(plan, 0, actions, read_actions("F3+ F0+", actions), first);
    harness_poison(&error, sizeof error);
    CHECK_INT(cf_run(plan, &schedule, 0, NULL, NULL, &error), CF_ERROR_SCHEDULE);
    CHECK_INT(error.wanted, 0);
    CHECK_INT(error.got, 3);
    cf_plan_free(plan);
}

/* A chunk that never ran its backward has not been trained; nothing may be dropped in silence. */
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
        cf_run_desc desc;
        cf_run_stats stats;
        cf_error error;
        cf_result result;
        books *judge, *b;
        host *h;
        cf_action *exact;
        int64_t n, count = harness_between(&rng, 1, 3), wanted, first[2];
        if (!f.plan) continue;
        n = f.schedule->n_actions;
        memcpy(actions, f.schedule->actions, (size_t)n * sizeof *actions);
        for (; count > 0 && n > 0; count--) damage_actions(&rng, f.plan, actions, &n);
        exact = (cf_action *)malloc((size_t)n * sizeof *exact + 1); /* so that a read past the end is seen */
        judge = new_books(f.plan, f.schedule->shape.rank);
        b = new_books(f.plan, f.schedule->shape.rank);
        h = new_host(b, &schedule);
        REQUIRE(judge && b && h && exact);
        memcpy(exact, actions, (size_t)n * sizeof *exact);
        wanted = book_all(judge, exact, n);
        schedule = wrap_actions(f.plan, f.schedule->shape.rank, exact, n, first);
        desc = desc_of(h);
        harness_poison(&error, sizeof error);
        result = cf_run(f.plan, &schedule, 0, &desc, &stats, &error);
        if (wanted >= 0) {
            CHECK_INT(result, CF_ERROR_SCHEDULE);
            if (result == CF_ERROR_SCHEDULE) CHECK_INT(error.item, wanted);
            CHECK_INT(stats.done, judge->stats.done);
            refused++;
        } else if (books_are_open(judge)) {
            open++; /* judged by the two tests above */
        } else {
            CHECK_INT(result, CF_OK);
            check_stats(&stats, &judge->stats);
            good++;
        }
        check_all_released(h);
        free(exact);
        free(judge);
        free(b);
        free(h);
        drop_fixture(&f);
    }
    harness_report("%d refused, %d incomplete, %d good", refused, open, good);
    CHECK(refused > 1500);
    CHECK(good > 100);
}

/* ---- memory ---- */

TEST(run_needs_exactly_what_run_size_says) {
    int i, judged = 0;
    for (i = 0; i < 300; i++) {
        fixture f = draw_fixture(70000000 + (uint64_t)i, 20);
        size_t need = 0;
        int64_t extra;
        if (!f.plan) continue;
        REQUIRE(cf_run_size(f.plan, f.schedule, &need, NULL) == CF_OK);
        for (extra = -1; extra <= 1; extra++) {
            harness_heap heap = {0};
            cf_allocator allocator = {harness_alloc, harness_release, NULL};
            size_t bytes = (size_t)((int64_t)need + extra);
            cf_run_desc desc;
            cf_run_stats stats;
            cf_error error;
            if (need == 0) continue;
            memset(&desc, 0, sizeof desc);
            allocator.user = &heap;
            desc.allocator = &allocator;
            desc.memory = extra == 0 ? malloc(bytes) : harness_guard_new(bytes);
            desc.bytes = bytes;
            if (extra < 0) {
                CHECK_INT(cf_run(f.plan, f.schedule, 0, &desc, &stats, &error), CF_ERROR_SPACE);
                CHECK_STR(error.field, "bytes");
                CHECK_INT(error.wanted, need);
                CHECK_INT(error.got, bytes);
                CHECK_POISON(desc.memory, bytes);
            } else {
                CHECK_INT(cf_run(f.plan, f.schedule, 0, &desc, &stats, &error), CF_OK);
                CHECK_INT(stats.done, f.schedule->n_actions);
            }
            CHECK_INT(heap.calls, 0); /* the caller's memory is enough */
            if (extra == 0) free(desc.memory);
            else harness_guard_free(desc.memory);
        }
        judged++;
        drop_fixture(&f);
    }
    CHECK(judged > 200);
}

/* ---- arguments ---- */

TEST(run_refuses_bad_arguments) {
    const int64_t bad_stages[] = {-1, 1, INT64_MAX, INT64_MIN};
    fixture f = known_fixture(2);
    cf_run_desc desc;
    cf_error error;
    size_t bytes;
    int64_t i;
    REQUIRE(f.plan && f.schedule);
    memset(&desc, 0, sizeof desc);
    harness_poison(&bytes, sizeof bytes);
    CHECK_INT(cf_run(NULL, f.schedule, 0, &desc, NULL, &error), CF_ERROR_ARGUMENT);
    CHECK_STR(error.field, "plan");
    CHECK_INT(cf_run(f.plan, NULL, 0, &desc, NULL, &error), CF_ERROR_ARGUMENT);
    CHECK_STR(error.field, "schedule");
    for (i = 0; i < COUNT(bad_stages); i++) {
        harness_note("stage %lld", (long long)bad_stages[i]);
        CHECK_INT(cf_run(f.plan, f.schedule, bad_stages[i], &desc, NULL, &error), CF_ERROR_ARGUMENT);
        CHECK_STR(error.field, "stage");
        CHECK_INT(error.got, bad_stages[i]);
    }
    harness_note("%s", "");
    CHECK_INT(cf_run_size(NULL, f.schedule, &bytes, &error), CF_ERROR_ARGUMENT);
    CHECK_STR(error.field, "plan");
    CHECK_INT(cf_run_size(f.plan, NULL, &bytes, &error), CF_ERROR_ARGUMENT);
    CHECK_STR(error.field, "schedule");
    CHECK_INT(cf_run_size(f.plan, f.schedule, NULL, &error), CF_ERROR_ARGUMENT);
    CHECK_STR(error.field, "bytes");
    CHECK_POISON(&bytes, sizeof bytes);
    drop_fixture(&f);
}

/* ---- standalone chunks that are replayed ---- */

typedef struct drops {
    uint64_t seeds[16];
    int64_t slots[16], n_replays;
} drops;

static int drops_forward(void *user, const cf_step *step) {
    drops *d = (drops *)user;
    int32_t chunk = step->action.chunk;
    CHECK_INT(step->slot >= 0, step->action.keep);
    if (step->action.pass == CF_R) {
        CHECK(step->seed == d->seeds[chunk]); /* so that it repeats its forward exactly */
        CHECK_INT(d->slots[chunk], -1);
        d->n_replays++;
    }
    d->seeds[chunk] = step->seed;
    d->slots[chunk] = step->slot;
    return 0;
}

static int drops_backward(void *user, const cf_step *step) {
    drops *d = (drops *)user;
    CHECK(step->slot >= 0 && step->slot == d->slots[step->action.chunk]);
    return 0;
}

/* `best` may drop any chunk on some of the stages only, and under a limit it pays. */
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
    CHECK_INT(f.plan->n_groups, 0);
    CHECK_INT(cf_schedule_make(f.plan, &order, &f.schedule, NULL), CF_OK);
    REQUIRE(f.schedule != NULL);
    CHECK_INT(cf_schedule_validate(f.plan, f.schedule, NULL, NULL, NULL), CF_OK);
    for (s = 0; s < n_stages; s++) {
        drops d = {0};
        cf_run_desc desc = {0};
        cf_run_stats stats;
        desc.user = &d;
        desc.forward = drops_forward;
        desc.backward = drops_backward;
        desc.seed = 42;
        CHECK_INT(cf_run(f.plan, f.schedule, s, &desc, &stats, NULL), CF_OK);
        CHECK(stats.peak_slots <= limit);
        last = d.n_replays;
        all += last;
    }
    CHECK(all > 0);
    CHECK_INT(last, 0); /* the last stage has nobody to wait for */
    harness_note("%s", "");
    drop_fixture(&f);
}

TEST(standalone_chunks_are_replayed) {
    int64_t n_stages;
    for (n_stages = 2; n_stages <= 4; n_stages++) check_drops(n_stages, 1);
    check_drops(6, 2);
}

TEST(an_empty_plan_runs) {
    cf_pack_desc pack = {0};
    cf_schedule_desc order = {0};
    fixture f = {NULL, NULL};
    cf_run_desc desc = {0};
    cf_run_stats stats;
    pack.chunk_size = 8;
    REQUIRE(cf_pack(NULL, 0, &pack, &f.plan, NULL) == CF_OK);
    REQUIRE(cf_schedule_make(f.plan, &order, &f.schedule, NULL) == CF_OK);
    harness_poison(&stats, sizeof stats);
    CHECK_INT(cf_run(f.plan, f.schedule, 0, &desc, &stats, NULL), CF_OK);
    CHECK(stats.done == 0 && stats.peak_slots == 0 && stats.peak_states == 0);
    drop_fixture(&f);
}

SUITE(run, CASE(callbacks_and_counts_of_random_schedules), CASE(counts_by_hand), CASE(capacities_are_high_water_marks),
      CASE(a_capacity_is_raised_only_where_all_is_well), CASE(a_capacity_is_not_read_past_the_plan),
      CASE(a_seed_belongs_to_chunk_and_stage), CASE(an_error_in_a_pass_stops_the_run_at_every_position),
      CASE(the_failing_callback_is_named), CASE(a_record_belongs_to_its_call), CASE(cancelling_works_at_every_position),
      CASE(a_refused_slot_stops_the_run), CASE(split_backwards_run), CASE(other_orders_run),
      CASE(impossible_actions_are_refused_where_they_stand),
      CASE(a_backward_before_later_forwards_is_refused), CASE(slots_left_in_use_are_an_error),
      CASE(slots_left_in_use_are_counted), CASE(a_chunk_left_out_is_an_error),
      CASE(damaged_schedules_are_judged_as_by_the_books), CASE(run_needs_exactly_what_run_size_says),
      CASE(run_refuses_bad_arguments), CASE(standalone_chunks_are_replayed), CASE(an_empty_plan_runs));
