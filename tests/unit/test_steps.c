/* >>steps: the steps of a stage are what cf_run tells its callbacks, one by one, on random problems of every kind. */

#include "chunkflow.h"
#include "../harness.h"
#include "../reference/naive.h"

#include <string.h>

#define MOST_SEQUENCES 12

/* What the interpreter is compared with, and what has been in use. */
typedef struct walk {
    const cf_plan *plan;
    const cf_steps *steps;
    int64_t n;                      /* steps so far */
    int64_t n_begun, n_ended;       /* states */
    const char *fault;
} walk;

/* Groups on the path, from the root down, with the rows that the chunk sees of each. */
static int is_path(const walk *w, const cf_step *told, const cf_steps_item *step) {
    int64_t n = told->n_path;
    int32_t i = step->path;
    if (w->plan->branches == NULL) return (i >= 0) == (told->chunk->group >= 0);
    for (; i >= 0; i = w->steps->paths[i].up) {
        const cf_steps_path *path = &w->steps->paths[i];
        int64_t seen = told->chunk->prefix - path->begin;
        const cf_path *want;
        if (--n < 0) return 0;
        want = &told->path[n];
        if (seen > path->rows) seen = path->rows;
        if (path->group != want->group || path->state != want->state || path->begin != want->begin ||
            seen != want->rows || (path->clear == step->position) != want->clear_gradient ||
            path->stage != told->action.stage)
            return 0;
    }
    return n == 0;
}

static int on_step(void *user, const cf_step *told) {
    walk *w = (walk *)user;
    const cf_steps_item *step = &w->steps->steps[w->n];
    int transfer = told->action.pass >= CF_COMPUTE_PASS_COUNT, state = !transfer && told->action.pass != CF_W;
    if (w->n++ >= w->steps->n) w->fault = "there are too few steps";
    else if (memcmp(&step->action, &told->action, sizeof step->action) != 0) w->fault = "another action";
    else if (step->position != told->position) w->fault = "another position";
    else if (step->slot != (transfer ? -1 : told->slot)) w->fault = "another activation slot";
    else if (step->state != (state ? told->state : -1)) w->fault = "another state slot";
    else if (step->input != told->input || step->output != told->output) w->fault = "another boundary slot";
    else if (step->peer != told->peer) w->fault = "another peer";
    else if (step->wants_loss != told->wants_loss) w->fault = "another wants_loss";
    else if (step->last_backward != told->last_backward) w->fault = "another last backward";
    else if (step->seed != told->seed) w->fault = "another seed";
    else if (state && step->clear_state_gradient != told->clear_state_gradient) w->fault = "clears otherwise";
    else if (state ? !is_path(w, told, step) : step->path != -1) w->fault = "another path";
    return w->fault != NULL;
}

static int on_state(walk *w, const cf_slot *slot, int ends) {
    int64_t i, step = w->n - ends;
    if (slot->what != CF_RESOURCE_STATE) return 0;
    for (i = 0; i < w->steps->n_paths; i++) {
        const cf_steps_path *path = &w->steps->paths[i];
        if (path->group == slot->owner && path->stage == slot->stage && path->state == slot->slot) break;
    }
    if (i == w->steps->n_paths || (ends ? w->steps->paths[i].last : w->steps->paths[i].first) != step)
        w->fault = ends ? "a state ends elsewhere" : "a state begins elsewhere";
    if (!ends && i != w->n_begun++) w->fault = "states out of order";
    w->n_ended += ends;
    return w->fault != NULL;
}

static int on_acquire(void *user, const cf_slot *slot) { return on_state((walk *)user, slot, 0); }
static void on_release(void *user, const cf_slot *slot) { (void)on_state((walk *)user, slot, 1); }

static int on_progress(void *user, const cf_progress *progress) {
    walk *w = (walk *)user;
    const cf_steps_item *step = &w->steps->steps[w->n - 1];
    if (step->live != progress->live_slots) w->fault = "another count of kept chunks";
    if (step->state_tokens != progress->live_state_tokens) w->fault = "another count of state";
    return w->fault != NULL;
}

static void check_stage(const cf_plan *plan, const cf_schedule *s, int64_t stage) {
    cf_run_desc run = {0};
    cf_run_stats stats;
    walk w = {0};
    cf_steps *steps = NULL;
    cf_error error = {0};
    cf_capacity from_run = {0}, from_steps = {0};
    run.user = &w;
    run.forward = run.backward = run.send = run.receive = on_step;
    run.acquire = on_acquire;
    run.release = on_release;
    run.progress = on_progress;
    run.seed = 77;
    if (!CHECK_INT(cf_steps_make(plan, s, stage, run.seed, NULL, &steps, &error), CF_OK)) FAIL("%s", error.text);
    if (!steps) return;
    w.plan = plan;
    w.steps = steps;
    (void)cf_run(plan, s, stage, &run, &stats, &error);
    if (w.fault) FAIL("stage %d, step %d: %s", (int)stage, (int)w.n - 1, w.fault);
    CHECK_INT(w.n, steps->n);
    CHECK_INT(w.n_begun, steps->n_paths);
    CHECK_INT(w.n_ended, steps->n_paths);
    CHECK_INT(steps->stage, stage);
    CHECK_INT(steps->transfers, s->lowered && s->shape.n_stages > 1);
    CHECK_INT(steps->n_slots, stats.peak_slots);
    CHECK_INT(steps->n_states, stats.peak_states);
    CHECK_INT(steps->n_boundaries, stats.peak_boundaries);
    CHECK_INT(steps->peak_tokens, stats.peak_tokens);
    CHECK_INT(steps->peak_state_tokens, stats.peak_state_tokens);
    CHECK_INT(cf_run_capacity(plan, s, stage, &from_run, NULL), CF_OK);
    CHECK_INT(cf_steps_capacity(plan, steps, &from_steps, NULL), CF_OK);
    CHECK(memcmp(&from_run, &from_steps, sizeof from_run) == 0);
    cf_steps_free(steps);
}

static cf_plan *draw_plan(harness_rng *rng, int *in_step) {
    int64_t lengths[MOST_SEQUENCES], n = harness_between(rng, 1, MOST_SEQUENCES), i;
    cf_share shares[MOST_SEQUENCES];
    cf_pack_desc desc = {0};
    cf_plan *plan = NULL;
    cf_error error = {0};
    int trees = harness_between(rng, 0, 2) == 0;
    desc.chunk_size = harness_between(rng, 1, 10);
    desc.n_ranks = harness_between(rng, 1, 3);
    desc.share_least = 1;
    for (i = 0; i < n; i++) {
        lengths[i] = harness_between(rng, 0, harness_between(rng, 0, 1) ? 60 : 8);
        shares[i].with = i > 0 ? harness_between(rng, 0, i - 1) : 0;
        shares[i].tokens = i > 0 ? lengths[i] : 0;
        if (lengths[shares[i].with] < shares[i].tokens) shares[i].tokens = lengths[shares[i].with];
        if (shares[i].tokens > 0) shares[i].tokens = harness_between(rng, 0, shares[i].tokens);
    }
    if (trees) desc.shares = shares;
    else desc.lockstep = harness_between(rng, 0, 3) == 0;
    if (desc.lockstep && desc.n_ranks > 1) desc.gang = 2;
    *in_step = desc.lockstep != 0;
    if (cf_pack(lengths, n, &desc, &plan, &error) != CF_OK) FAIL("%s", error.text);
    return plan;
}

/* A schedule of the library's, where it has one of that shape, or one in random order. */
static cf_schedule *draw_one(harness_rng *rng, const cf_plan *plan) {
    cf_schedule_desc desc = {0};
    cf_schedule *s = NULL;
    cf_error error = {0};
    desc.kind = (cf_schedule_kind)harness_between(rng, CF_SCHEDULE_PAPER, CF_SCHEDULE_COUNT - 1);
    desc.shape.n_stages = harness_between(rng, 1, 4);
    desc.shape.k = harness_between(rng, 1, 3);
    desc.shape.replay = (cf_replay)harness_between(rng, CF_REPLAY_DEFAULT, CF_REPLAY_LOCAL);
    desc.shape.rank = harness_between(rng, 0, plan->n_ranks - 1);
    desc.budget = 3;
    if (desc.kind >= CF_SCHEDULE_INTERLEAVED) desc.shape.n_virtual = harness_between(rng, 1, 3);
    if (desc.kind == CF_SCHEDULE_BEST) {
        desc.split_backward = (int)harness_between(rng, 0, 1);
        desc.shape.forward_only = harness_between(rng, 0, 3) == 0;
    }
    if (desc.kind > CF_SCHEDULE_INTERLEAVED && desc.shape.n_virtual == 2 && harness_between(rng, 0, 1))
        desc.shape.placement = CF_PLACEMENT_V;
    if (cf_schedule_make(plan, &desc, &s, NULL) == CF_OK) return s;
    memset(&desc, 0, sizeof desc);
    desc.shape.n_stages = harness_between(rng, 1, 4);
    if (cf_schedule_make(plan, &desc, &s, &error) != CF_OK) FAIL("%s", error.text);
    return s;
}

/* The same, or the part of a rank among ranks in step; and mostly lowered. */
static cf_schedule *draw_schedule(harness_rng *rng, const cf_plan *plan, int in_step) {
    cf_plan *columns = NULL;
    cf_schedule *s = NULL, *other = NULL;
    if (in_step) CHECK_INT(cf_columns_make(plan, NULL, NULL, &columns, NULL), CF_OK);
    s = draw_one(rng, columns ? columns : plan);
    if (s && harness_between(rng, 0, 3) > 0) {
        CHECK_INT(cf_schedule_lower(columns ? columns : plan, s, NULL, &other, NULL), CF_OK);
        cf_schedule_free(s);
        s = other;
    }
    if (s && columns) {
        other = NULL;
        CHECK_INT(cf_columns_schedule(plan, s, harness_between(rng, 0, plan->n_ranks - 1), NULL, &other, NULL), CF_OK);
        cf_schedule_free(s);
        s = other;
    }
    cf_plan_free(columns);
    return s;
}

TEST(steps_are_what_callbacks_are_told) {
    harness_rng rng = {61};
    int round, n_lowered = 0, n_trees = 0, n_virtual = 0, n_forward = 0;
    for (round = 0; round < harness_rounds(3000, 400); round++) {
        int in_step = 0;
        cf_plan *plan = draw_plan(&rng, &in_step);
        cf_schedule *s = plan ? draw_schedule(&rng, plan, in_step) : NULL;
        int64_t stage;
        harness_note("round %d", round);
        REQUIRE(s != NULL);
        for (stage = 0; stage < s->shape.n_stages; stage++) check_stage(plan, s, stage);
        n_lowered += s->lowered && s->shape.n_stages > 1;
        n_trees += plan->branches != NULL;
        n_virtual += s->shape.n_virtual > 1;
        n_forward += s->shape.forward_only != 0;
        cf_schedule_free(s);
        cf_plan_free(plan);
    }
    harness_note("%s", "");
    CHECK(n_lowered > round / 4 && n_trees > round / 10 && n_virtual > round / 10 && n_forward > round / 50);
}

SUITE(steps, CASE(steps_are_what_callbacks_are_told));
