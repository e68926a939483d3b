/* >>run: lowered schedules. Every stage is run by cf_run with callbacks that write down what they are told; then the
   notes of all stages are played together, with a boundary buffer per slot: every tensor must be the right one when
   it is read. */

#include "chunkflow.h"
#include "../harness.h"
#include "../reference/naive.h"

#include <stdlib.h>
#include <string.h>

typedef struct notes {
    cf_step *steps;
    int64_t n, room;
    /* slots by resource: owner of each, -1 where it is free */
    int64_t owner[3][512], stage_of[3][512]; /* and the virtual stage that it is for */
    int64_t acquired, released, live[3], peak[3];
    int64_t freed[3][512];  /* what `released` was when the slot was given back; 0: it is in use, or never was */
    int64_t fail_at;   /* this callback (from 1) reports 41; 0: none does */
    int64_t calls;
    const cf_error *raised; /* what it says of its failure; all callbacks before it say so too, but do not fail */
    int bad;           /* a slot was taken twice, out of turn, or freed twice */
} notes;

static void notes_start(notes *all) {
    int i, j;
    memset(all, 0, sizeof *all);
    for (i = 0; i < 3; i++)
        for (j = 0; j < 512; j++) all->owner[i][j] = -1;
}

/* The virtual stage that the slot of an input is for: the pass's own, and where a V turns, that of the pass which has
   made the tensor. */
static int64_t maker_of_input(const cf_step *step) {
    int64_t v = step->action.stage, from = step->action.pass == CF_B || step->action.pass == CF_I ? v + 1 : v - 1;
    if (step->action.pass > CF_W || naive_stage(step->schedule, from) != naive_stage(step->schedule, v)) return v;
    return from;
}

/* What a slot is said to be for must be what the action at hand is about. */
static int check_slot(const notes *all, const cf_step *step) {
    int64_t input = step->input, output = step->output, virtual_stage = step->action.stage;
    if (step->slot >= 0 && all->stage_of[CF_RESOURCE_ACTIVATIONS][step->slot] != virtual_stage) return 0;
    if (step->state >= 0 && all->stage_of[CF_RESOURCE_STATE][step->state] != virtual_stage) return 0;
    if (input >= 0 && all->stage_of[CF_RESOURCE_BOUNDARY][input] != maker_of_input(step)) return 0;
    return output < 0 || all->stage_of[CF_RESOURCE_BOUNDARY][output] == virtual_stage;
}

static int may_fail(notes *all, cf_error *error) {
    if (all->raised) *error = *all->raised;
    return ++all->calls == all->fail_at ? 41 : 0;
}

static int note(notes *all, const cf_step *step) {
    if (all->n == all->room) {
        all->room = 2 * all->room + 64;
        all->steps = (cf_step *)realloc(all->steps, (size_t)all->room * sizeof *all->steps);
        if (!all->steps) abort();
    }
    all->steps[all->n++] = *step;
    if (!check_slot(all, step)) all->bad = 1;
    return may_fail(all, step->error);
}

static int on_pass(void *user, const cf_step *step) { return note((notes *)user, step); }

/* A slot is taken again before a new one is made, and of those that are free the one first that has been so longest. */
static int is_next(const notes *all, cf_resource what, int64_t slot) {
    int64_t i, n = 0, first = -1;
    for (i = 0; i < 512; i++) {
        n += all->owner[what][i] >= 0 || all->freed[what][i] > 0;
        if (all->freed[what][i] > 0 && (first < 0 || all->freed[what][i] < all->freed[what][first])) first = i;
    }
    return slot == (first >= 0 ? first : n);
}

static int on_acquire(void *user, const cf_slot *taken) {
    notes *all = (notes *)user;
    const cf_resource what = taken->what;
    const int64_t slot = taken->slot;
    if (may_fail(all, taken->error)) return 41;
    if (slot < 0 || slot >= 512 || all->owner[what][slot] >= 0 || !is_next(all, what, slot)) {
        all->bad = 1;
        return 0;
    }
    all->freed[what][slot] = 0;
    all->owner[what][slot] = taken->owner;
    all->stage_of[what][slot] = taken->stage;
    all->acquired++;
    if (++all->live[what] > all->peak[what]) all->peak[what] = all->live[what];
    return 0;
}

static void on_release(void *user, const cf_slot *freed) {
    notes *all = (notes *)user;
    const cf_resource what = freed->what;
    const int64_t slot = freed->slot;
    if (slot < 0 || slot >= 512 || all->owner[what][slot] != freed->owner ||
        all->stage_of[what][slot] != freed->stage) {
        all->bad = 1;
        return;
    }
    all->owner[what][slot] = -1;
    all->freed[what][slot] = ++all->released;
    all->live[what]--;
}

static cf_run_desc callbacks(notes *all) {
    cf_run_desc desc = {0};
    desc.user = all;
    desc.forward = on_pass;
    desc.backward = on_pass;
    desc.send = on_pass;
    desc.receive = on_pass;
    desc.acquire = on_acquire;
    desc.release = on_release;
    return desc;
}

/* ---- playing the notes ---- */

typedef struct tensor {
    int64_t chunk, stage; /* the virtual stage that made it */
    int kind;             /* by F 0, R 1, backward 2; -1: nothing */
} tensor;

static int kind_of(int pass) {
    if (pass == CF_F || pass == CF_SEND_F || pass == CF_RECV_F) return 0;
    return pass == CF_R || pass == CF_SEND_R || pass == CF_RECV_R ? 1 : 2;
}

static int is_tensor(const tensor *t, int64_t chunk, int64_t stage, int kind) {
    return t->chunk == chunk && t->stage == stage && t->kind == kind;
}

#define MOST_STAGES 5
#define MOST_SLOTS 512

/* What a pass must find in its input slot, or -1 in place of a slot. */
static const char *play_pass(const cf_schedule *s, const cf_step *step, tensor *buffers) {
    const cf_action *a = &step->action;
    int64_t last = s->shape.n_stages * s->shape.n_virtual - 1;
    int forward = a->pass == CF_F || a->pass == CF_R, back = a->pass == CF_B || a->pass == CF_I,
        kind = kind_of(a->pass);
    int reads = s->shape.n_stages > 1 && ((forward && a->stage > 0) || (back && a->stage < last));
    if (a->pass == CF_R && s->shape.replay == CF_REPLAY_LOCAL) kind = 0; /* it reads the input of F again */
    if (reads != (step->input >= 0)) return "an input slot where there is none, or none where there is one";
    if (reads && !is_tensor(&buffers[step->input], a->chunk, forward ? a->stage - 1 : a->stage + 1, kind))
        return "a wrong input";
    if (step->output >= 0) {
        buffers[step->output].chunk = a->chunk;
        buffers[step->output].stage = a->stage;
        buffers[step->output].kind = kind_of(a->pass);
    }
    return step->peer == -1 ? NULL : "a pass with a peer";
}

static const char *play(const cf_schedule *s, const notes *all) {
    static tensor buffers[MOST_STAGES][MOST_SLOTS];
    int64_t at[MOST_STAGES], stage, i;
    int moved = 1;
    for (stage = 0; stage < s->shape.n_stages; stage++) {
        at[stage] = 0;
        for (i = 0; i < MOST_SLOTS; i++) buffers[stage][i].kind = -1;
    }
    while (moved) {
        for (stage = 0, moved = 0; stage < s->shape.n_stages; stage++) {
            const cf_step *a, *b;
            const char *fault;
            if (at[stage] == all[stage].n) continue;
            a = &all[stage].steps[at[stage]];
            if (a->action.pass <= CF_W) {
                if ((fault = play_pass(s, a, buffers[stage])) != NULL) return fault;
                at[stage]++;
                moved = 1;
                continue;
            }
            if (a->action.pass == CF_RECV_F || a->action.pass == CF_RECV_R || a->action.pass == CF_RECV_B) continue;
            if (a->peer < 0 || a->peer >= s->shape.n_stages || a->peer == stage) return "a send to no other stage";
            if (at[a->peer] == all[a->peer].n) continue;
            b = &all[a->peer].steps[at[a->peer]];
            if (b->action.pass != a->action.pass + 1 || b->action.chunk != a->action.chunk || b->peer != stage)
                continue;
            if (!is_tensor(&buffers[stage][a->output], a->action.chunk, a->action.stage, kind_of(a->action.pass)))
                return "a send of another tensor";
            buffers[a->peer][b->input] = buffers[stage][a->output];
            buffers[stage][a->output].kind = -1;
            at[stage]++;
            at[a->peer]++;
            moved = 1;
        }
    }
    for (stage = 0; stage < s->shape.n_stages; stage++)
        if (at[stage] < all[stage].n) return "the stages wait for each other";
    return NULL;
}

/* Most tokens of state on the stage at once, counted from the list alone. */
static int64_t peak_state(const cf_plan *plan, const cf_schedule *s, int64_t stage) {
    int64_t i, now = 0, most = 0;
    for (i = s->first[stage]; i < s->first[stage + 1]; i++) {
        const cf_action *a = &s->actions[i];
        int64_t rows = plan->chunks[a->chunk].group < 0 ? 0 : plan->slices[plan->chunks[a->chunk].first_slice].length;
        if (a->pass == CF_F) now += rows;
        if (now > most) most = now;
        if (a->pass == CF_B || a->pass == CF_I) now -= rows;
    }
    return most;
}

static cf_schedule *draw(harness_rng *rng, const cf_plan *plan) {
    naive_shape shape = naive_draw_shape(rng);
    cf_schedule *s, *low = NULL;
    shape.rank = harness_between(rng, 0, plan->n_ranks - 1);
    s = naive_schedule(rng, plan, &shape);
    if (s != NULL) CHECK_INT(cf_schedule_lower(plan, s, NULL, &low, NULL), CF_OK);
    naive_free(s);
    return low;
}

/* Of every chunk with tokens, one forward on all stages takes the loss: on the last virtual stage, and what it computes
   is kept. On each virtual stage the first backward of a group, and no other, clears the gradient of the state. */
static void check_flags(const cf_plan *plan, const cf_schedule *s, const notes *all) {
    int64_t losses[512] = {0}, cleared[512 * 32] = {0}, stage, i, last = s->shape.n_stages * s->shape.n_virtual - 1;
    REQUIRE(plan->n_chunks <= 512 && plan->n_groups <= 512 && last < 32);
    for (stage = 0; stage < s->shape.n_stages; stage++)
        for (i = 0; i < all[stage].n; i++) {
            const cf_step *step = &all[stage].steps[i];
            int back = step->action.pass == CF_B || step->action.pass == CF_I;
            losses[step->action.chunk] += step->wants_loss;
            if (step->wants_loss) CHECK(step->action.stage == last && step->slot >= 0 && step->action.pass <= CF_R);
            if (step->clear_state_gradient) CHECK(back && step->chunk->group >= 0);
            if (!back || step->chunk->group < 0) continue;
            CHECK_INT(step->clear_state_gradient, cleared[step->chunk->group * 32 + step->action.stage] == 0);
            cleared[step->chunk->group * 32 + step->action.stage] = 1;
        }
    for (i = 0; i < plan->n_chunks; i++)
        CHECK_INT(losses[i], plan->chunks[i].rank == s->shape.rank && plan->chunks[i].tokens > 0);
}

/* The largest of what each stage needs. */
static void raise_capacity(cf_capacity *most, const cf_run_stats *stats) {
    if (stats->peak_slots > most->slots) most->slots = stats->peak_slots;
    if (stats->peak_states > most->states) most->states = stats->peak_states;
    if (stats->peak_boundaries > most->boundaries) most->boundaries = stats->peak_boundaries;
}

TEST(every_tensor_is_where_it_is_read) {
    harness_rng rng = {51};
    int round;
    for (round = 0; round < harness_rounds(1500, 200); round++) {
        cf_plan *plan = naive_plan(&rng, 6, harness_between(&rng, 1, 2));
        cf_schedule *s = draw(&rng, plan);
        static notes all[MOST_STAGES];
        cf_capacity most = {0, 0, 0, 0, 0, 0}, wanted = {0, 0, 0, 0, 0, 0};
        const char *fault;
        int64_t stage;
        REQUIRE(s != NULL);
        harness_note("round %d", round);
        for (stage = 0; stage < s->shape.n_stages; stage++) {
            cf_run_desc desc;
            cf_run_stats stats;
            cf_error error = {0};
            notes_start(&all[stage]);
            desc = callbacks(&all[stage]);
            if (!CHECK_INT(cf_run(plan, s, stage, &desc, &stats, &error), CF_OK)) FAIL("%s", error.text);
            CHECK_INT(all[stage].n, s->first[stage + 1] - s->first[stage]);
            CHECK(!all[stage].bad && all[stage].acquired == all[stage].released);
            CHECK_INT(stats.peak_boundaries, all[stage].peak[CF_RESOURCE_BOUNDARY]);
            CHECK_INT(stats.peak_slots, all[stage].peak[CF_RESOURCE_ACTIVATIONS]);
            CHECK_INT(stats.peak_slots, naive_peak_chunks(plan, s, stage));
            CHECK_INT(stats.peak_state_tokens, peak_state(plan, s, stage));
            CHECK_INT(stats.done, all[stage].n);
            if (s->shape.n_stages == 1) CHECK_INT(stats.peak_boundaries, 0);
            raise_capacity(&wanted, &stats);
            CHECK_INT(cf_run_capacity(plan, s, stage, &most, NULL), CF_OK);
        }
        CHECK(most.slots == wanted.slots && most.states == wanted.states && most.boundaries == wanted.boundaries);
        check_flags(plan, s, all);
        fault = play(s, all);
        if (fault) FAIL("%s", fault);
        for (stage = 0; stage < s->shape.n_stages; stage++) free(all[stage].steps);
        cf_schedule_free(s);
        cf_plan_free(plan);
    }
    harness_note("%s", "");
}

/* A group that is replayed, on two stages. */
static cf_schedule *small_lowered(cf_plan **plan) {
    static const int64_t lengths[] = {8, 4, 4, 4, 4};
    cf_pack_desc pack = {0};
    cf_schedule_desc order = {0};
    cf_schedule *s = NULL, *low = NULL;
    pack.chunk_size = 4;
    order.kind = CF_SCHEDULE_PAPER;
    order.shape.replay = CF_REPLAY_PIPELINE;
    order.shape.n_stages = 2;
    CHECK_INT(cf_pack(lengths, 5, &pack, plan, NULL), CF_OK);
    CHECK_INT(cf_schedule_make(*plan, &order, &s, NULL), CF_OK);
    CHECK_INT(cf_schedule_lower(*plan, s, NULL, &low, NULL), CF_OK);
    cf_schedule_free(s);
    return low;
}

/* Every callback of a small run fails once; nothing stays acquired, and the one that failed is named. */
TEST(a_failing_callback_ends_the_stage_cleanly) {
    static const char *const names[] = {"forward", "backward", "send", "receive", "acquire"};
    cf_plan *plan = NULL;
    cf_schedule *low = small_lowered(&plan);
    int64_t stage, seen[5];
    memset(seen, 0, sizeof seen);
    REQUIRE(low != NULL);
    for (stage = 0; stage < 2; stage++) {
        int64_t fail;
        for (fail = 1;; fail++) {
            static notes all;
            cf_run_desc desc;
            cf_error error;
            cf_result result;
            size_t i;
            notes_start(&all);
            all.fail_at = fail;
            desc = callbacks(&all);
            result = cf_run(plan, low, stage, &desc, NULL, &error);
            free(all.steps);
            CHECK(!all.bad && all.acquired == all.released);
            if (result == CF_OK) break;
            CHECK_INT(result, CF_ERROR_CALLBACK);
            CHECK_INT(error.got, 41);
            for (i = 0; i < 5; i++) seen[i] += strcmp(error.field, names[i]) == 0;
            REQUIRE(fail < 1000);
        }
    }
    CHECK(seen[0] && seen[1] && seen[2] && seen[3] && seen[4]);
    cf_schedule_free(low);
    cf_plan_free(plan);
}

/* A callback's own error comes out as it went in, with the pass before its text; a record that a callback leaves
   without failing is nobody's error. */
TEST(an_error_that_a_callback_raises_comes_out) {
    cf_plan *plan = NULL;
    cf_schedule *low = small_lowered(&plan);
    cf_error raised = {7, CF_ERROR_SPACE, "registers", 8, 9, "registers[7]: spilled"}, error;
    int64_t stage, fail;
    REQUIRE(low != NULL);
    for (stage = 0; stage < 2; stage++)
        for (fail = 1;; fail++) {
            static notes all;
            cf_run_desc desc;
            cf_result result;
            int is_long = fail % 2 == 0;
            if (is_long) memset(raised.text, 'x', sizeof raised.text - 1);
            else strcpy(raised.text, "registers[7]: spilled");
            notes_start(&all);
            all.fail_at = fail;
            all.raised = &raised;
            desc = callbacks(&all);
            result = cf_run(plan, low, stage, &desc, NULL, &error);
            free(all.steps);
            CHECK(!all.bad && all.acquired == all.released);
            if (result == CF_OK) break;
            CHECK(result == CF_ERROR_SPACE && error.code == CF_ERROR_SPACE && strcmp(error.field, "registers") == 0);
            CHECK(error.item == 7 && error.wanted == 8 && error.got == 9);
            CHECK(strstr(error.text, " of chunk ") != NULL && strstr(error.text, "(stage ") != NULL);
            CHECK(strstr(error.text, is_long ? ": xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx" : ": registers[7]: spilled") !=
                  NULL);
            CHECK(memchr(error.text, '\0', sizeof error.text) != NULL);
            REQUIRE(fail < 1000);
        }
    CHECK(fail > 20);
    cf_schedule_free(low);
    cf_plan_free(plan);
}

/* Whatever is in the actions, a run ends, gives everything back, and succeeds if the validator has nothing to say. */
TEST(damaged_lowered_lists_are_survived) {
    harness_rng rng = {52};
    int round, refused = 0;
    for (round = 0; round < harness_rounds(3000, 750); round++) {
        cf_plan *plan = naive_plan(&rng, 5, harness_between(&rng, 1, 2));
        cf_schedule *low = draw(&rng, plan), *s;
        int64_t stage, edits;
        int sound;
        REQUIRE(low != NULL);
        harness_note("round %d", round);
        s = naive_copy(low);
        cf_schedule_free(low);
        for (edits = harness_between(&rng, 0, 2); edits > 0 && s->n_actions > 0; edits--) {
            cf_action *a = &s->actions[harness_between(&rng, 0, s->n_actions - 1)];
            switch (harness_between(&rng, 0, 4)) {
                case 0: a->pass = (uint8_t)harness_between(&rng, 0, CF_PASS_COUNT); break;
                case 1: a->chunk = (int32_t)harness_between(&rng, -1, plan->n_chunks); break;
                case 2: a->stage = (int32_t)harness_between(&rng, -1, s->shape.n_stages * s->shape.n_virtual); break;
                case 3: a->keep ^= 1; break;
                default: *a = s->actions[harness_between(&rng, 0, s->n_actions - 1)]; break;
            }
        }
        sound = cf_schedule_validate(plan, s, NULL, NULL, NULL) == CF_OK;
        for (stage = 0; stage < s->shape.n_stages; stage++) {
            static notes all;
            cf_run_desc desc;
            cf_error error;
            cf_result result;
            notes_start(&all);
            desc = callbacks(&all);
            result = cf_run(plan, s, stage, &desc, NULL, &error);
            CHECK(result == CF_OK || result == CF_ERROR_SCHEDULE);
            CHECK(!sound || result == CF_OK);
            CHECK(!all.bad && all.acquired == all.released);
            refused += result != CF_OK;
            free(all.steps);
        }
        naive_free(s);
        cf_plan_free(plan);
    }
    CHECK(refused > harness_rounds(500, 125));
    harness_note("%s", "");
}

static cf_result run_lists(const cf_plan *plan, const uint8_t *passes, int64_t n, int64_t stage, cf_error *error) {
    cf_schedule *s = naive_new(2, n);
    cf_run_desc desc;
    cf_result result;
    int64_t i;
    s->shape.replay = CF_REPLAY_PIPELINE;
    s->shape.n_virtual = 1;
    s->shape.k = 1;
    s->n_chunks = plan->n_chunks;
    s->lowered = 1;
    for (i = 0; i < n; i++) {
        s->actions[i].pass = passes[i];
        s->actions[i].stage = (int32_t)stage;
        s->actions[i].keep = passes[i] == CF_F;
    }
    s->first[1] = stage == 0 ? n : 0;
    s->first[2] = n;
    memset(&desc, 0, sizeof desc);
    memset(error, 0, sizeof *error);
    result = cf_run(plan, s, stage, &desc, NULL, error);
    naive_free(s);
    return result;
}

TEST(impossible_transfers_are_named) {
    static const uint8_t good[] = {CF_F, CF_SEND_F, CF_RECV_B, CF_B};
    static const uint8_t early[] = {CF_SEND_F, CF_F, CF_RECV_B, CF_B};
    static const uint8_t twice[] = {CF_F, CF_SEND_F, CF_SEND_F, CF_RECV_B, CF_B};
    static const uint8_t again[] = {CF_F, CF_SEND_F, CF_RECV_B, CF_RECV_B, CF_B};
    static const uint8_t late[] = {CF_F, CF_SEND_F, CF_B, CF_RECV_B};
    static const uint8_t edge[] = {CF_RECV_F, CF_F, CF_SEND_F, CF_RECV_B, CF_B};
    static const uint8_t unread[] = {CF_F, CF_SEND_F, CF_RECV_B, CF_B, CF_RECV_R};
    static const int64_t lengths[] = {2};
    cf_plan *plan = NULL;
    cf_error error;
    REQUIRE((plan = naive_pack(lengths, 1, 2)) != NULL);
    CHECK_INT(run_lists(plan, good, 4, 0, &error), CF_OK);
    CHECK_INT(run_lists(plan, early, 4, 0, &error), CF_ERROR_SCHEDULE);
    CHECK_INT(error.item, 0);
    CHECK_INT(run_lists(plan, twice, 5, 0, &error), CF_ERROR_SCHEDULE);
    CHECK_INT(error.item, 2);
    CHECK_INT(run_lists(plan, again, 5, 0, &error), CF_ERROR_SCHEDULE);
    CHECK_INT(error.item, 3);
    CHECK_INT(run_lists(plan, late, 4, 0, &error), CF_ERROR_SCHEDULE);
    CHECK(error.item == 2 && strstr(error.text, "before its RECV_B") != NULL);
    CHECK_INT(run_lists(plan, edge, 5, 0, &error), CF_ERROR_SCHEDULE);
    CHECK(error.item == 0 && strstr(error.text, "no other stage") != NULL);
    CHECK_INT(run_lists(plan, unread, 5, 0, &error), CF_ERROR_SCHEDULE);
    CHECK_INT(error.item, 4);
    cf_plan_free(plan);
}

/* ---- one action at a time ---- */

static int same_step(const cf_step *a, const cf_step *b) {
    return memcmp(&a->action, &b->action, sizeof a->action) == 0 && a->position == b->position && a->slot == b->slot &&
           a->state == b->state && a->input == b->input &&
           a->output == b->output && a->peer == b->peer && a->seed == b->seed && a->chunk == b->chunk;
}

static void check_same_run(const notes *a, const notes *b, const cf_run_stats *stats, const cf_run_stats *wanted) {
    int64_t i;
    REQUIRE(a->n == b->n);
    for (i = 0; i < a->n; i++) CHECK(same_step(&a->steps[i], &b->steps[i]));
    CHECK_INT(a->calls, b->calls);
    CHECK(!a->bad && a->acquired == a->released && a->released == b->released);
    CHECK(memcmp(stats, wanted, sizeof *stats) == 0);
}

/* Several stages driven from one thread, in any order, each in its own memory: every callback and every count is that
   of cf_run. */
TEST(runners_side_by_side_do_what_run_does) {
    harness_rng rng = {54};
    int round;
    for (round = 0; round < 500; round++) {
        cf_plan *plan = naive_plan(&rng, 6, harness_between(&rng, 1, 2));
        cf_schedule *s = draw(&rng, plan);
        static notes all[MOST_STAGES], whole[MOST_STAGES];
        cf_runner *runners[MOST_STAGES];
        cf_run_stats wanted[MOST_STAGES], stats;
        void *memory[MOST_STAGES];
        int64_t stage, left;
        size_t bytes = 0;
        cf_error error;
        REQUIRE(s != NULL);
        harness_note("round %d", round);
        REQUIRE(cf_run_size(plan, s, &bytes, NULL) == CF_OK);
        for (stage = 0; stage < s->shape.n_stages; stage++) {
            cf_run_desc desc;
            notes_start(&whole[stage]);
            desc = callbacks(&whole[stage]);
            CHECK_INT(cf_run(plan, s, stage, &desc, &wanted[stage], NULL), CF_OK);
            notes_start(&all[stage]);
            desc = callbacks(&all[stage]);
            memory[stage] = desc.memory = round % 3 ? harness_guard_new(bytes) : NULL;
            desc.bytes = bytes;
            REQUIRE(cf_run_open(plan, s, stage, &desc, &runners[stage], NULL) == CF_OK);
            harness_poison(&desc, sizeof desc); /* it was copied */
            CHECK_INT(all[stage].calls, 0);
        }
        harness_poison(&error, sizeof error);
        for (left = s->n_actions; left > 0;) {
            int64_t before, goes_on;
            stage = harness_between(&rng, 0, s->shape.n_stages - 1);
            before = all[stage].n;
            goes_on = before < s->first[stage + 1] - s->first[stage];
            CHECK_INT(cf_run_next(runners[stage], &error), CF_OK); /* at the end of a list it does nothing */
            if (!CHECK_INT(all[stage].n, before + goes_on)) break;
            left -= goes_on;
        }
        for (stage = 0; stage < s->shape.n_stages; stage++) {
            harness_poison(&stats, sizeof stats);
            CHECK_INT(cf_run_close(runners[stage], &stats, &error), CF_OK);
            check_same_run(&all[stage], &whole[stage], &stats, &wanted[stage]);
            if (memory[stage]) harness_guard_free(memory[stage]);
            free(all[stage].steps);
            free(whole[stage].steps);
        }
        CHECK_POISON(&error, sizeof error);
        cf_schedule_free(s);
        cf_plan_free(plan);
    }
    harness_note("%s", "");
}

TEST(a_runner_can_be_closed_at_any_point) {
    cf_plan *plan = NULL;
    cf_schedule *s = small_lowered(&plan);
    int64_t stage, stop, i;
    harness_heap heap = {0};
    cf_allocator allocator = {harness_alloc, harness_release, &heap};
    REQUIRE(s != NULL);
    for (stage = 0; stage < 2; stage++) {
        int64_t total = s->first[stage + 1] - s->first[stage];
        for (stop = 0; stop <= total; stop++) {
            static notes all;
            cf_run_desc desc;
            cf_run_stats stats;
            cf_error error;
            cf_runner *runner = NULL;
            notes_start(&all);
            desc = callbacks(&all);
            desc.allocator = &allocator;
            CHECK_INT(cf_run_open(plan, s, stage, &desc, &runner, NULL), CF_OK);
            for (i = 0; i < stop; i++) CHECK_INT(cf_run_next(runner, NULL), CF_OK);
            harness_poison(&stats, sizeof stats);
            harness_poison(&error, sizeof error);
            CHECK_INT(cf_run_close(runner, &stats, &error), stop < total ? CF_ERROR_CANCELLED : CF_OK);
            CHECK_INT(stats.done, stop);
            CHECK(!all.bad && all.acquired == all.released);
            CHECK_INT(all.n, stop);
            CHECK_INT(heap.live, 0);
            if (stop < total) CHECK(error.code == CF_ERROR_CANCELLED && error.item == stop && error.wanted == total);
            else CHECK_POISON(&error, sizeof error);
            free(all.steps);
        }
    }
    CHECK_INT(cf_run_close(NULL, NULL, NULL), CF_OK);
    CHECK_INT(cf_run_next(NULL, NULL), CF_ERROR_ARGUMENT);
    cf_schedule_free(s);
    cf_plan_free(plan);
}

/* The first error is the run's result, however often it is asked for. */
TEST(a_failed_runner_repeats_its_error) {
    cf_plan *plan = NULL;
    cf_schedule *s = small_lowered(&plan);
    static notes all;
    cf_run_desc desc;
    cf_run_stats stats;
    cf_error first, error;
    cf_runner *runner = NULL;
    int64_t calls;
    int i;
    REQUIRE(s != NULL);
    notes_start(&all);
    all.fail_at = 9;
    desc = callbacks(&all);
    REQUIRE(cf_run_open(plan, s, 0, &desc, &runner, NULL) == CF_OK);
    while (cf_run_next(runner, &first) == CF_OK) REQUIRE(all.calls < all.fail_at);
    CHECK(first.code == CF_ERROR_CALLBACK && first.got == 41);
    calls = all.calls;
    for (i = 0; i < 3; i++) {
        harness_poison(&error, sizeof error);
        CHECK_INT(cf_run_next(runner, &error), CF_ERROR_CALLBACK);
        CHECK(memcmp(&error, &first, sizeof error) == 0);
    }
    CHECK_INT(all.calls, calls);
    CHECK(all.acquired > all.released);
    harness_poison(&error, sizeof error);
    CHECK_INT(cf_run_close(runner, &stats, &error), CF_ERROR_CALLBACK);
    CHECK(memcmp(&error, &first, sizeof error) == 0);
    CHECK_INT(stats.done, first.item);
    CHECK(!all.bad && all.acquired == all.released);
    free(all.steps);
    cf_schedule_free(s);
    cf_plan_free(plan);
}

TEST(a_runner_that_cannot_start_is_not_made) {
    cf_plan *plan = NULL;
    cf_schedule *s = small_lowered(&plan);
    harness_heap heap = {0};
    cf_allocator allocator = {harness_alloc, harness_release, &heap};
    cf_run_desc desc;
    cf_runner *runner;
    int64_t i;
    REQUIRE(s != NULL);
    memset(&desc, 0, sizeof desc);
    harness_poison(&runner, sizeof runner);
    CHECK_INT(cf_run_open(NULL, s, 0, &desc, &runner, NULL), CF_ERROR_ARGUMENT);
    CHECK_INT(cf_run_open(plan, NULL, 0, &desc, &runner, NULL), CF_ERROR_ARGUMENT);
    CHECK_INT(cf_run_open(plan, s, 2, &desc, &runner, NULL), CF_ERROR_ARGUMENT);
    CHECK_INT(cf_run_open(plan, s, 0, &desc, NULL, NULL), CF_ERROR_ARGUMENT);
    desc.allocator = &allocator;
    heap.fail_at = 1;
    CHECK_INT(cf_run_open(plan, s, 0, &desc, &runner, NULL), CF_ERROR_MEMORY);
    heap.fail_at = 0;
    for (i = 0; i < s->n_actions && s->actions[i].pass != CF_SEND_F; i++) continue;
    REQUIRE(i < s->n_actions);
    s->actions[i].stage = 1; /* the last virtual stage has nobody to send to */
    CHECK_INT(cf_run_open(plan, s, 0, &desc, &runner, NULL), CF_ERROR_SCHEDULE);
    CHECK_INT(heap.live, 0);
    CHECK_POISON(&runner, sizeof runner);
    cf_schedule_free(s);
    cf_plan_free(plan);
}

SUITE(run_lowered, CASE(every_tensor_is_where_it_is_read), CASE(a_failing_callback_ends_the_stage_cleanly),
      CASE(an_error_that_a_callback_raises_comes_out),
      CASE(damaged_lowered_lists_are_survived), CASE(impossible_transfers_are_named),
      CASE(runners_side_by_side_do_what_run_does),
      CASE(a_runner_can_be_closed_at_any_point), CASE(a_failed_runner_repeats_its_error),
      CASE(a_runner_that_cannot_start_is_not_made));
