/* Tests the promise of `best` on small random problems: with fewer choices a search finds nothing shorter. */

#include "../harness.h"
#include "../reference/naive.h"
#include "../reference/pipeline.h"
#include "../reference/problem.h"

#include <math.h>
#include <string.h>

/* Returns HUGE_VAL if there is no such schedule. */
static double makespan_of(const cf_plan *plan, cf_schedule_desc desc) {
    cf_search_report report = {0};
    cf_schedule *schedule = NULL;
    desc.report = &report;
    if (cf_schedule_make(plan, &desc, &schedule, NULL) != CF_OK) return HUGE_VAL;
    cf_schedule_free(schedule);
    return report.makespan;
}

/* Tries so few candidates that one search would miss what another finds, unless it looks there as well. */
static void draw(uint64_t seed, problem *p) {
    harness_rng rng = {seed};
    problem_draw(&rng, NULL, p);
    p->desc.kind = CF_SCHEDULE_BEST;
    p->desc.shape.replay = CF_REPLAY_LOCAL;
    p->desc.max_tries = 4;
    p->desc.split_backward = 0;
    if (p->desc.limits.chunks == 0 && p->desc.limits.chunks_by_stage == NULL)
        p->desc.limits.chunks = CF_NO_LIMIT;
}

/* Counts cases in which more choices help: a test in which the two never differ would show nothing. */
static void compare(double with_more, double with_less, int *n_better) {
    CHECK(with_more <= with_less * (1 + 1e-12));
    *n_better += with_more < with_less * (1 - 1e-12) && with_less < HUGE_VAL;
}

/* Gives the problem more room, or the other description fewer choices. Returns 0 if the two cannot be compared. */
typedef int vary_fn(uint64_t seed, const cf_plan *plan, cf_schedule_desc *more, cf_schedule_desc *less);

static void compare_all(vary_fn *vary) {
    uint64_t seed;
    int n_better = 0;
    for (seed = 1; seed <= (uint64_t)harness_rounds(400, 60); seed++) {
        problem p;
        cf_schedule_desc less;
        draw(seed, &p);
        less = p.desc;
        if (vary(seed, p.plan, &p.desc, &less))
            compare(makespan_of(p.plan, p.desc), makespan_of(p.plan, less), &n_better);
        problem_free(&p);
    }
    CHECK(n_better > 0);
}

static int split_more(uint64_t seed, const cf_plan *plan, cf_schedule_desc *more, cf_schedule_desc *less) {
    (void)seed, (void)plan, (void)less;
    more->split_backward = 1;
    return 1;
}

TEST(never_longer_than_with_whole_backwards) { compare_all(split_more); }

static int search_more(uint64_t seed, const cf_plan *plan, cf_schedule_desc *more, cf_schedule_desc *less) {
    (void)plan;
    less->max_tries = 1 + (int64_t)(seed % 8);
    more->max_tries = less->max_tries + 1 + (int64_t)(seed % 30);
    more->split_backward = less->split_backward = seed % 3 == 0;
    return 1;
}

TEST(never_longer_than_with_fewer_tries) { compare_all(search_more); }

/* Compares with a fixed kind of as many virtual stages, within the same limits. Defaults that bind only `best` are
   lifted. */
TEST(never_longer_than_a_fixed_kind) {
    uint64_t seed;
    int n_better = 0;
    for (seed = 1; seed <= (uint64_t)harness_rounds(400, 60); seed++) {
        problem p;
        cf_schedule_desc desc;
        double best;
        int kind;
        draw(seed, &p);
        p.desc.split_backward = seed % 2;
        if (p.desc.limits.state == 0) p.desc.limits.state = CF_NO_LIMIT;
        if (p.desc.limits.chunks == 0) p.desc.limits.chunks = CF_NO_LIMIT;
        best = makespan_of(p.plan, p.desc);
        for (kind = CF_SCHEDULE_PAPER; kind < CF_SCHEDULE_BEST; kind++) {
            cf_schedule *schedule = NULL;
            desc = p.desc;
            desc.kind = (cf_schedule_kind)kind;
            desc.split_backward = 0;
            if (kind == CF_SCHEDULE_ZERO_BUBBLE && !p.desc.split_backward) continue;
            if (kind < CF_SCHEDULE_ZERO_BUBBLE && desc.shape.placement == CF_PLACEMENT_V) continue;
            if (kind != CF_SCHEDULE_ZERO_BUBBLE && (kind == CF_SCHEDULE_INTERLEAVED) != (desc.shape.n_virtual > 1))
                continue;
            if (cf_schedule_make(p.plan, &desc, &schedule, NULL) != CF_OK) continue;
            compare(best, pipeline_makespan(p.plan, schedule, desc.timing, NULL, NULL), &n_better);
            cf_schedule_free(schedule);
        }
        problem_free(&p);
    }
    CHECK(n_better > 0);
}

/* ---- tight limits ---- */

/* One stage that runs chunks one by one, counted by the definitions of cf_held_bytes. */
typedef struct alone {
    const cf_plan *plan;
    const cf_held_bytes *bytes;
    int64_t rows;                      /* virtual stages of the stage */
    int64_t state, gradient, inputs;   /* tokens held now */
    int64_t most_bytes, most_state;    /* most_state: of all virtual stages together */
} alone;

/* now: rows whose activations exist while a pass runs. */
static void note_held(alone *a, int64_t now) {
    int64_t held = a->state * a->bytes->state + a->gradient * a->bytes->state_gradient +
                   a->inputs * a->bytes->boundary + now * a->bytes->activations;
    if (held > a->most_bytes) a->most_bytes = held;
    if (a->state > a->most_state) a->most_state = a->state;
}

/* Runs a chunk's forwards, then everything that continues it, then its replays and backwards. A chunk that nothing
   continues keeps its activations on the last virtual stage. All else is dropped and replayed. */
static void one_by_one(alone *a, int64_t id) {
    const cf_chunk *c = &a->plan->chunks[id];
    int64_t own = c->chain >= 0 ? c->state : 0, row, other, n_below = 0;
    for (other = id + 1; other < a->plan->chunks_per_rank; other++) n_below += a->plan->chunks[other].up == id;
    for (row = 0; row < a->rows; row++) {
        int kept = n_below == 0 && row + 1 == a->rows;
        a->state += own;
        if (!kept) a->inputs += c->rows;
        /* The first chain that continues another one allocates the gradient of that chain's state. */
        if (c->up >= 0 && c->up == id - 1 && a->plan->chunks[c->up].chain != c->chain)
            a->gradient += a->plan->chains[a->plan->chunks[c->up].chain].tokens;
        note_held(a, kept ? c->rows : 0);
    }
    for (other = id + 1; other < a->plan->chunks_per_rank; other++)
        if (a->plan->chunks[other].up == id) one_by_one(a, other);
    for (row = a->rows - 1; row >= 0; row--) {
        if (n_below > 0 || row + 1 < a->rows) a->inputs -= c->rows;
        if (n_below == 0 && c->chain >= 0) a->gradient += a->plan->chains[c->chain].tokens;
        note_held(a, c->rows);
        a->state -= own;
        a->gradient -= own;
    }
}

/* Lists, or trees in which sequences continue any earlier ones. */
static cf_plan *draw_tight(harness_rng *rng, int trees) {
    cf_shared_prefix shares[12];
    int64_t lengths[12], n = harness_between(rng, 1, 12), i;
    cf_pack_desc desc = {.chunk_size = 4, .shared_prefixes = shares, .min_shared_prefix = 1};
    cf_plan *plan = NULL;
    for (i = 0; i < n; i++) lengths[i] = harness_between(rng, 1, harness_chance(rng, 0.4) ? 20 : 4);
    if (!trees) return naive_pack(lengths, n, 4);
    memset(shares, 0, sizeof shares);
    for (i = 1; i < n; i++) {
        shares[i].with = harness_between(rng, 0, i - 1);
        shares[i].tokens = lengths[shares[i].with] < lengths[i] ? lengths[shares[i].with] : lengths[i];
        if (harness_chance(rng, 0.5)) shares[i].tokens = harness_between(rng, 0, shares[i].tokens);
    }
    CHECK_INT(cf_pack(lengths, n, &desc, &plan, NULL), CF_OK);
    return plan;
}

/* Chains, standalone chunks and trees, of every kind, with just the room for one sequence or tree at a time. One byte
   less is refused, and the error gives that room. */
TEST(where_one_chunk_fits_there_is_a_schedule) {
    uint64_t seed;
    for (seed = 1; seed <= (uint64_t)harness_rounds(500, 120); seed++) {
        harness_rng rng = {seed};
        int64_t i;
        int kind;
        cf_plan *plan = draw_tight(&rng, seed % 3 == 0);
        REQUIRE(plan != NULL);
        for (kind = CF_SCHEDULE_PAPER; kind <= CF_SCHEDULE_BEST; kind++) {
            cf_schedule_desc desc = {0};
            cf_validate_desc validate = {0};
            cf_schedule *schedule = NULL;
            cf_error error = {0};
            alone count = {0};
            desc.kind = (cf_schedule_kind)kind;
            desc.shape.n_stages = harness_between(&rng, 1, 4);
            desc.shape.n_virtual = kind == CF_SCHEDULE_INTERLEAVED  ? harness_between(&rng, 2, 3)
                                   : kind > CF_SCHEDULE_INTERLEAVED ? harness_between(&rng, 1, 3)
                                                                    : 1;
            if (kind > CF_SCHEDULE_INTERLEAVED && harness_chance(&rng, 0.4)) desc.shape.placement = CF_PLACEMENT_V;
            problem_settle(&desc);
            desc.shape.k = harness_between(&rng, 1, 4);
            desc.split_backward = kind == CF_SCHEDULE_BEST && harness_chance(&rng, 0.5);
            desc.max_tries = harness_between(&rng, 1, 20);
            desc.limits.per_token.activations = harness_between(&rng, 1, 8);
            desc.limits.per_token.state = harness_between(&rng, 0, 3);
            desc.limits.per_token.state_gradient = harness_between(&rng, 0, 3);
            desc.limits.per_token.boundary = harness_between(&rng, 0, harness_chance(&rng, 0.3) ? 12 : 2);
            count.plan = plan;
            count.rows = desc.shape.n_virtual;
            count.bytes = &desc.limits.per_token;
            for (i = 0; i < plan->n_chunks; i++)
                if (plan->chunks[i].up < 0) one_by_one(&count, i);
            CHECK(count.state == 0 && count.gradient == 0 && count.inputs == 0);
            desc.limits.chunks = harness_between(&rng, 1, harness_chance(&rng, 0.5) ? 1 : 4);
            if (harness_chance(&rng, 0.5))
                desc.limits.state = count.most_state > 0 ? count.most_state / count.rows : 1;
            if (harness_chance(&rng, 0.6))
                desc.limits.bytes = count.most_bytes + (harness_chance(&rng, 0.5) ? 0 : count.most_bytes / 4);
            harness_note("seed %d, %s, %d stages x %d, %d chunks, chunks %d, bytes %d", (int)seed,
                         cf_schedule_kind_name(desc.kind), (int)desc.shape.n_stages, (int)desc.shape.n_virtual,
                         (int)plan->n_chunks, (int)desc.limits.chunks, (int)desc.limits.bytes);
            if (cf_schedule_make(plan, &desc, &schedule, &error) != CF_OK) FAIL("%s", error.text);
            validate.limits = desc.limits;
            if (schedule != NULL) CHECK_INT(cf_schedule_validate(plan, schedule, &validate, NULL, NULL), CF_OK);
            cf_schedule_free(schedule);
            if (count.most_bytes < 2) continue;
            desc.limits.bytes = count.most_bytes - 1;
            desc.limits.state = 0;
            CHECK_INT(cf_schedule_make(plan, &desc, &schedule, &error), CF_ERROR_INFEASIBLE);
            CHECK_STR(error.field, "limits.bytes");
            CHECK_INT(error.wanted, count.most_bytes);
        }
        cf_plan_free(plan);
    }
    harness_note("%s", "");
}

/* A limit within which everything fits changes nothing: the schedule equals the one without a limit. */
TEST(a_limit_that_binds_nothing_changes_nothing) {
    uint64_t seed;
    for (seed = 1; seed <= (uint64_t)harness_rounds(200, 40); seed++) {
        problem p;
        cf_schedule *without = NULL, *with = NULL;
        cf_schedule_desc desc;
        draw(seed, &p);
        desc = p.desc;
        desc.limits.chunks_by_stage = desc.limits.bytes_by_stage = NULL;
        desc.limits.chunks = CF_NO_LIMIT;
        desc.limits.bytes = 0;
        CHECK_INT(cf_schedule_make(p.plan, &desc, &without, NULL), CF_OK);
        if (seed % 2) desc.limits.chunks = 1000000;
        desc.limits.per_token.state = seed % 3 != 0;
        desc.limits.bytes = seed % 2 ? 0 : (int64_t)1 << 40;
        CHECK_INT(cf_schedule_make(p.plan, &desc, &with, NULL), CF_OK);
        REQUIRE(with != NULL && without != NULL);
        CHECK_INT(with->n_actions, without->n_actions);
        CHECK(memcmp(with->actions, without->actions, (size_t)with->n_actions * sizeof *with->actions) == 0);
        cf_schedule_free(with);
        cf_schedule_free(without);
        problem_free(&p);
    }
}

/* ---- state ---- */

/* Batches of many chains, with and without virtual stages; some try so few candidates that only fixed schedules are
   made. Without the limit of state some batches must hold more, or the test would show nothing. */
TEST(state_does_not_grow_with_the_batch) {
    uint64_t seed;
    int n_extra = 0;
    for (seed = 1; seed <= (uint64_t)harness_rounds(160, 60); seed++) {
        harness_rng rng = {seed};
        int64_t lengths[64], n = harness_between(&rng, 8, 64), i;
        cf_schedule *bounded = NULL, *free_of_it = NULL;
        cf_schedule_desc desc = {0};
        cf_plan *plan = NULL;
        for (i = 0; i < n; i++) lengths[i] = harness_between(&rng, 1, seed % 3 ? 24 : 12);
        plan = naive_pack(lengths, n, 4);
        REQUIRE(plan != NULL);
        desc.shape.n_stages = harness_between(&rng, 1, 6);
        desc.shape.n_virtual = 1 + (int64_t)(seed % 4 == 0);
        desc.shape.placement = seed % 8 == 0 ? CF_PLACEMENT_V : CF_PLACEMENT_LOOP;
        desc.shape.k = harness_between(&rng, 1, 4);
        desc.split_backward = seed % 7 == 0;
        desc.max_tries = harness_between(&rng, 1, 24);
        if (seed % 6 == 0) desc.limits.chunks = 3 * desc.shape.n_stages * desc.shape.n_virtual;
        harness_note("seed %d", (int)seed);
        CHECK_INT(cf_schedule_make(plan, &desc, &bounded, NULL), CF_OK);
        desc.limits.chunks = CF_NO_LIMIT;
        CHECK_INT(cf_schedule_make(plan, &desc, &free_of_it, NULL), CF_OK);
        REQUIRE(bounded != NULL && free_of_it != NULL);
        CHECK_INT(cf_schedule_validate(plan, bounded, NULL, NULL, NULL), CF_OK);
        CHECK(pipeline_state_over_default(plan, bounded) <= 1);
        n_extra += pipeline_state_over_default(plan, free_of_it) > 1;
        cf_schedule_free(bounded);
        cf_schedule_free(free_of_it);
        cf_plan_free(plan);
    }
    CHECK(n_extra > 0);
    harness_report("%d of them would hold more", n_extra);
}

/* ---- the fixed kinds that are dispatched ---- */

/* Batches of chains under limits, with several virtual stages a stage. A sequence that waits for room never blocks one
   that has started, so every schedule reaches its end. */
TEST(dispatched_kinds_come_to_an_end) {
    uint64_t seed;
    int n_made = 0;
    for (seed = 1; seed <= (uint64_t)harness_rounds(2000, 500); seed++) {
        harness_rng rng = {seed};
        int64_t lengths[12], n = harness_between(&rng, 1, 12), i;
        cf_schedule *schedule = NULL;
        cf_schedule_desc desc = {0};
        cf_pack_desc packing = {0};
        cf_plan *plan = NULL;
        packing.chunk_size = 2;
        packing.max_slices = 1;
        for (i = 0; i < n; i++) lengths[i] = harness_between(&rng, 1, 12);
        CHECK_INT(cf_pack(lengths, n, &packing, &plan, NULL), CF_OK);
        REQUIRE(plan != NULL);
        desc.kind = seed % 2 ? CF_SCHEDULE_INTERLEAVED : CF_SCHEDULE_ZERO_BUBBLE;
        desc.shape.n_stages = harness_between(&rng, 1, 5);
        desc.shape.n_virtual = harness_between(&rng, 1, 3);
        desc.shape.placement = seed % 4 == 0 ? CF_PLACEMENT_V : CF_PLACEMENT_LOOP;
        desc.shape.k = harness_between(&rng, 1, 4);
        desc.limits.chunks = desc.shape.n_virtual * harness_between(&rng, 0, 6);
        harness_note("seed %d", (int)seed);
        if (cf_schedule_make(plan, &desc, &schedule, NULL) == CF_OK) {
            CHECK_INT(cf_schedule_validate(plan, schedule, NULL, NULL, NULL), CF_OK);
            n_made++;
        }
        cf_schedule_free(schedule);
        cf_plan_free(plan);
    }
    CHECK(n_made > harness_rounds(1500, 400));
}

/* ---- the warm-up of interleaved ---- */

/* Returns the largest number of forwards that a stage is ahead of its backwards. */
static int64_t most_ahead(const cf_schedule *s, int64_t stage) {
    int64_t i, ahead = 0, most = 0;
    for (i = s->first[stage]; i < s->first[stage + 1]; i++) {
        ahead += s->actions[i].pass == CF_F ? 1 : s->actions[i].pass == CF_B ? -1 : 0;
        if (ahead > most) most = ahead;
    }
    return most;
}

/* Megatron's warm-up plus one forward, also if the chunks do not divide into rounds. A stage after the first whose
   backward is not there yet may run one more. */
TEST(interleaved_runs_as_far_ahead_as_its_warm_up) {
    int64_t lengths[13], i, s;
    cf_schedule_desc desc;
    cf_plan *plan = NULL;
    for (i = 0; i < 13; i++) lengths[i] = 1;
    plan = naive_pack(lengths, 13, 1);
    REQUIRE(plan != NULL);
    memset(&desc, 0, sizeof desc);
    desc.kind = CF_SCHEDULE_INTERLEAVED;
    for (desc.shape.n_stages = 2; desc.shape.n_stages <= 4; desc.shape.n_stages++) {
        for (desc.shape.n_virtual = 2; desc.shape.n_virtual <= 3; desc.shape.n_virtual++) {
            cf_schedule *schedule = NULL;
            CHECK_INT(cf_schedule_make(plan, &desc, &schedule, NULL), CF_OK);
            REQUIRE(schedule != NULL);
            for (s = 0; s < desc.shape.n_stages; s++) {
                int64_t wanted =
                    2 * (desc.shape.n_stages - 1 - s) + (desc.shape.n_virtual - 1) * desc.shape.n_stages + 1;
                int64_t ahead = most_ahead(schedule, s);
                CHECK(ahead == wanted || (s > 0 && ahead == wanted + 1));
            }
            cf_schedule_free(schedule);
        }
    }
    cf_plan_free(plan);
}

SUITE(promises, CASE(never_longer_than_with_whole_backwards), CASE(never_longer_than_with_fewer_tries),
      CASE(never_longer_than_a_fixed_kind), CASE(a_limit_that_binds_nothing_changes_nothing),
      CASE(where_one_chunk_fits_there_is_a_schedule),
      CASE(state_does_not_grow_with_the_batch), CASE(dispatched_kinds_come_to_an_end),
      CASE(interleaved_runs_as_far_ahead_as_its_warm_up));
