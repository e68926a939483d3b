/* >>steps: lowered schedules. The steps of all stages are played together, with a boundary buffer per slot: every
   tensor must be the right one when it is read. */

#include "chunkflow.h"
#include "../harness.h"
#include "../reference/naive.h"

#include <stdlib.h>
#include <string.h>

#define MOST_STAGES 5
#define MOST_SLOTS 512

enum { ACTIVATIONS, STATES, BOUNDARIES };

/* Slots of each kind, as the steps of a stage take them and give them back. */
typedef struct slots {
    int64_t stage_of[3][MOST_SLOTS]; /* the virtual stage that each slot in use is for; -1 where it is free */
    int64_t freed[3][MOST_SLOTS];    /* how many were given back by then, with it; 0: it is in use, or never was */
    int64_t released, live[3], peak[3];
    int bad;                         /* a slot was taken twice, out of turn, or freed twice */
} slots;

/* The virtual stage that the slot of an input is for: the pass's own, and where a V turns, that of the pass which has
   made the tensor. */
static int64_t maker_of_input(const cf_schedule *s, const cf_step *step) {
    int64_t v = step->action.stage, from = step->action.pass == CF_B || step->action.pass == CF_I ? v + 1 : v - 1;
    if (step->action.pass > CF_W || naive_stage(s, from) != naive_stage(s, v)) return v;
    return from;
}

/* A slot is taken again before a new one is made, and of those that are free the one first that has been so longest. */
static int is_next(const slots *all, int what, int64_t slot) {
    int64_t i, n = 0, first = -1;
    for (i = 0; i < MOST_SLOTS; i++) {
        n += all->stage_of[what][i] >= 0 || all->freed[what][i] > 0;
        if (all->freed[what][i] > 0 && (first < 0 || all->freed[what][i] < all->freed[what][first])) first = i;
    }
    return slot == (first >= 0 ? first : n);
}

static void take(slots *all, int what, int64_t slot, int64_t stage) {
    if (slot < 0 || slot >= MOST_SLOTS || all->stage_of[what][slot] >= 0 || !is_next(all, what, slot)) {
        all->bad = 1;
        return;
    }
    all->freed[what][slot] = 0;
    all->stage_of[what][slot] = stage;
    if (++all->live[what] > all->peak[what]) all->peak[what] = all->live[what];
}

static void give(slots *all, int what, int64_t slot, int64_t stage) {
    if (slot < 0 || slot >= MOST_SLOTS || all->stage_of[what][slot] != stage) {
        all->bad = 1;
        return;
    }
    all->stage_of[what][slot] = -1;
    all->freed[what][slot] = ++all->released;
    all->live[what]--;
}

/* What a step needs is there, for its virtual stage; and what nobody needs any more goes. */
static void walk_step(slots *all, const cf_schedule *s, const cf_steps *steps, const cf_step *step) {
    const cf_path *path = step->path >= 0 ? &steps->paths[step->path] : NULL;
    int pass = step->action.pass, stage = step->action.stage, local = s->shape.replay == CF_REPLAY_LOCAL;
    if (path && path->first == step->position) take(all, STATES, path->state, stage);
    if (step->action.keep) take(all, ACTIVATIONS, step->slot, stage);
    if (pass <= CF_W && step->output >= 0) take(all, BOUNDARIES, step->output, stage);
    if (pass > CF_W && step->input >= 0) take(all, BOUNDARIES, step->input, stage);
    if (pass > CF_W && (step->slot != -1 || step->state != -1 || step->path != -1)) all->bad = 1;
    if (step->slot >= 0 && all->stage_of[ACTIVATIONS][step->slot] != stage) all->bad = 1;
    if (step->state >= 0 && all->stage_of[STATES][step->state] != stage) all->bad = 1;
    if (step->input >= 0 && all->stage_of[BOUNDARIES][step->input] != maker_of_input(s, step)) all->bad = 1;
    if (step->output >= 0 && all->stage_of[BOUNDARIES][step->output] != stage) all->bad = 1;
    if (pass == CF_B || pass == CF_W) give(all, ACTIVATIONS, step->slot, stage);
    if (path && path->last == step->position) give(all, STATES, path->state, stage);
    if (pass > CF_W && step->output >= 0) give(all, BOUNDARIES, step->output, stage);
    if (pass <= CF_W && step->input >= 0 && (pass != CF_F || step->action.keep || !local))
        give(all, BOUNDARIES, step->input, maker_of_input(s, step));
}

/* Walks through a stage's steps; returns what was in use. */
static const slots *walk(const cf_schedule *s, const cf_steps *steps) {
    static slots all;
    int64_t i, j;
    memset(&all, 0, sizeof all);
    for (i = 0; i < 3; i++)
        for (j = 0; j < MOST_SLOTS; j++) all.stage_of[i][j] = -1;
    for (i = 0; i < steps->n; i++) walk_step(&all, s, steps, &steps->steps[i]);
    if (all.live[0] || all.live[1] || all.live[2]) all.bad = 1;
    return &all;
}

/* ---- playing the steps ---- */

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

static const char *play(const cf_schedule *s, cf_steps *const *all) {
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
            if (at[stage] == all[stage]->n) continue;
            a = &all[stage]->steps[at[stage]];
            if (a->action.pass <= CF_W) {
                if ((fault = play_pass(s, a, buffers[stage])) != NULL) return fault;
                at[stage]++;
                moved = 1;
                continue;
            }
            if (a->action.pass == CF_RECV_F || a->action.pass == CF_RECV_R || a->action.pass == CF_RECV_B) continue;
            if (a->peer < 0 || a->peer >= s->shape.n_stages || a->peer == stage) return "a send to no other stage";
            if (at[a->peer] == all[a->peer]->n) continue;
            b = &all[a->peer]->steps[at[a->peer]];
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
        if (at[stage] < all[stage]->n) return "the stages wait for each other";
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
static void check_flags(const cf_plan *plan, const cf_schedule *s, cf_steps *const *all) {
    int64_t losses[512] = {0}, cleared[512 * 32] = {0}, stage, i, last = s->shape.n_stages * s->shape.n_virtual - 1;
    REQUIRE(plan->n_chunks <= 512 && plan->n_groups <= 512 && last < 32);
    for (stage = 0; stage < s->shape.n_stages; stage++)
        for (i = 0; i < all[stage]->n; i++) {
            const cf_step *step = &all[stage]->steps[i];
            int64_t group = plan->chunks[step->action.chunk].group;
            int back = step->action.pass == CF_B || step->action.pass == CF_I;
            losses[step->action.chunk] += step->wants_loss;
            if (step->wants_loss) CHECK(step->action.stage == last && step->slot >= 0 && step->action.pass <= CF_R);
            if (step->clear_state_gradient) CHECK(back && group >= 0);
            if (!back || group < 0) continue;
            CHECK_INT(step->clear_state_gradient, cleared[group * 32 + step->action.stage] == 0);
            cleared[group * 32 + step->action.stage] = 1;
        }
    for (i = 0; i < plan->n_chunks; i++)
        CHECK_INT(losses[i], plan->chunks[i].rank == s->shape.rank && plan->chunks[i].tokens > 0);
}

TEST(every_tensor_is_where_it_is_read) {
    harness_rng rng = {51};
    int round;
    for (round = 0; round < harness_rounds(1500, 200); round++) {
        cf_plan *plan = naive_plan(&rng, 6, harness_between(&rng, 1, 2));
        cf_schedule *s = draw(&rng, plan);
        cf_steps *all[MOST_STAGES] = {NULL};
        cf_capacity most = {0, 0, 0, 0, 0, 0}, wanted = {0, 0, 0, 0, 0, 0};
        const char *fault;
        int64_t stage;
        REQUIRE(s != NULL);
        harness_note("round %d", round);
        for (stage = 0; stage < s->shape.n_stages; stage++) {
            const slots *used;
            cf_error error = {0};
            if (!CHECK_INT(cf_steps_make(plan, s, stage, 0, NULL, &all[stage], &error), CF_OK)) FAIL("%s", error.text);
            REQUIRE(all[stage] != NULL);
            used = walk(s, all[stage]);
            CHECK_INT(all[stage]->n, s->first[stage + 1] - s->first[stage]);
            CHECK(!used->bad);
            CHECK_INT(all[stage]->transfers, s->shape.n_stages > 1);
            CHECK_INT(all[stage]->n_boundaries, used->peak[BOUNDARIES]);
            CHECK_INT(all[stage]->n_slots, used->peak[ACTIVATIONS]);
            CHECK_INT(all[stage]->n_slots, naive_peak_chunks(plan, s, stage));
            CHECK_INT(all[stage]->n_states, used->peak[STATES]);
            CHECK_INT(all[stage]->peak_state_tokens, peak_state(plan, s, stage));
            if (s->shape.n_stages == 1) CHECK_INT(all[stage]->n_boundaries, 0);
            if (all[stage]->n_slots > wanted.slots) wanted.slots = all[stage]->n_slots;
            if (all[stage]->n_states > wanted.states) wanted.states = all[stage]->n_states;
            if (all[stage]->n_boundaries > wanted.boundaries) wanted.boundaries = all[stage]->n_boundaries;
            CHECK_INT(cf_steps_capacity(plan, all[stage], &most, NULL), CF_OK);
        }
        CHECK(most.slots == wanted.slots && most.states == wanted.states && most.boundaries == wanted.boundaries);
        check_flags(plan, s, all);
        fault = play(s, all);
        if (fault) FAIL("%s", fault);
        for (stage = 0; stage < s->shape.n_stages; stage++) cf_steps_free(all[stage]);
        cf_schedule_free(s);
        cf_plan_free(plan);
    }
    harness_note("%s", "");
}

/* Without transfers in the schedule nothing crosses between the stages, and the steps say so; all else is the same. */
TEST(without_transfers_nothing_crosses) {
    harness_rng rng = {53};
    int round, crossed = 0;
    for (round = 0; round < harness_rounds(300, 60); round++) {
        cf_plan *plan = naive_plan(&rng, 6, 1);
        naive_shape shape = naive_draw_shape(&rng);
        cf_schedule *s, *low = NULL;
        int64_t stage, i, j;
        shape.rank = 0;
        s = naive_schedule(&rng, plan, &shape);
        REQUIRE(s != NULL && cf_schedule_lower(plan, s, NULL, &low, NULL) == CF_OK);
        for (stage = 0; stage < s->shape.n_stages; stage++) {
            cf_steps *before = NULL, *after = NULL;
            REQUIRE(cf_steps_make(plan, s, stage, 9, NULL, &before, NULL) == CF_OK);
            REQUIRE(cf_steps_make(plan, low, stage, 9, NULL, &after, NULL) == CF_OK);
            CHECK(before->transfers == 0 && before->n_boundaries == 0);
            CHECK(after->transfers == (s->shape.n_stages > 1));
            CHECK(before->n_slots == after->n_slots && before->peak_tokens == after->peak_tokens);
            CHECK(before->n_paths == after->n_paths && before->peak_state_tokens == after->peak_state_tokens);
            for (i = j = 0; i < before->n; i++, j++) {
                const cf_step *a = &before->steps[i], *b;
                while (after->steps[j].action.pass > CF_W) j++;
                b = &after->steps[j];
                CHECK(a->input == -1 && a->output == -1 && a->peer == -1);
                CHECK(memcmp(&a->action, &b->action, sizeof a->action) == 0 && a->slot == b->slot);
                CHECK(a->state == b->state && a->path == b->path && a->seed == b->seed && a->live == b->live);
                CHECK(a->wants_loss == b->wants_loss && a->clear_state_gradient == b->clear_state_gradient);
                CHECK(a->last_backward == b->last_backward && a->state_tokens == b->state_tokens);
                crossed += b->input >= 0;
            }
            cf_steps_free(before);
            cf_steps_free(after);
        }
        cf_schedule_free(low);
        naive_free(s);
        cf_plan_free(plan);
    }
    CHECK(crossed > 100);
}

/* Whatever is in the actions, steps are made or refused, and made if the validator has nothing to say. */
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
            cf_steps *steps = NULL;
            cf_error error;
            cf_result result = cf_steps_make(plan, s, stage, 0, NULL, &steps, &error);
            CHECK(result == CF_OK || result == CF_ERROR_SCHEDULE);
            CHECK(!sound || result == CF_OK);
            CHECK((steps != NULL) == (result == CF_OK));
            if (steps != NULL) CHECK(!walk(s, steps)->bad);
            refused += result != CF_OK;
            cf_steps_free(steps);
        }
        naive_free(s);
        cf_plan_free(plan);
    }
    CHECK(refused > harness_rounds(500, 125));
    harness_note("%s", "");
}

static cf_result list_steps(const cf_plan *plan, const uint8_t *passes, int64_t n, int64_t stage, cf_error *error) {
    cf_schedule *s = naive_new(2, n);
    cf_steps *steps = NULL;
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
    memset(error, 0, sizeof *error);
    result = cf_steps_make(plan, s, stage, 0, NULL, &steps, error);
    cf_steps_free(steps);
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
    CHECK_INT(list_steps(plan, good, 4, 0, &error), CF_OK);
    CHECK_INT(list_steps(plan, early, 4, 0, &error), CF_ERROR_SCHEDULE);
    CHECK_INT(error.item, 0);
    CHECK_INT(list_steps(plan, twice, 5, 0, &error), CF_ERROR_SCHEDULE);
    CHECK_INT(error.item, 2);
    CHECK_INT(list_steps(plan, again, 5, 0, &error), CF_ERROR_SCHEDULE);
    CHECK_INT(error.item, 3);
    CHECK_INT(list_steps(plan, late, 4, 0, &error), CF_ERROR_SCHEDULE);
    CHECK(error.item == 2 && strstr(error.text, "before its RECV_B") != NULL);
    CHECK_INT(list_steps(plan, edge, 5, 0, &error), CF_ERROR_SCHEDULE);
    CHECK(error.item == 0 && strstr(error.text, "no other stage") != NULL);
    CHECK_INT(list_steps(plan, unread, 5, 0, &error), CF_ERROR_SCHEDULE);
    CHECK_INT(error.item, 4);
    cf_plan_free(plan);
}

SUITE(steps_lowered, CASE(every_tensor_is_where_it_is_read), CASE(without_transfers_nothing_crosses),
      CASE(damaged_lowered_lists_are_survived), CASE(impossible_transfers_are_named));
