/* Tests >>tune: the search against brute force over the same candidates, with an independent sampler and memory
   count. */

#include "chunkflow.h"
#include "../harness.h"
#include "../reference/naive.h"
#include "tools/chunkflow_tune.h"

#include <math.h>
#include <string.h>

#define MOST_BATCH 32
#define MOST_BATCHES 6
#define MOST_STAGES 16

/* A model so small that chunks decide a GPU's memory. */
static const cf_model small = {"small", 8, 256, 4, 2, 64, 512, 1000, 0, 0, 0, 0, 0, 0, NULL, 0, NULL, 0, 0, 0};

static const int64_t sizes[] = {256, 512, 1024, 2048};
static const int64_t ks[] = {1, 2, 4, 16};
static const cf_schedule_kind kinds[] = {CF_SCHEDULE_PAPER, CF_SCHEDULE_1F1B, CF_SCHEDULE_ZERO_BUBBLE,
                                         CF_SCHEDULE_BEST};
static const cf_replay both[] = {CF_REPLAY_PIPELINE, CF_REPLAY_LOCAL};

typedef struct fixture {
    int64_t lengths[100];
    cf_shared_prefix shares[100];
    /* the sequence that begins a sequence's tree, and the one that begins its branch of it */
    int64_t prompt[100], turn[100];
    cf_gpu gpu;
    cf_tune_desc desc;
} fixture;

static void fixture_fill(fixture *f, uint64_t seed) {
    harness_rng rng = {seed};
    int64_t i;
    memset(f, 0, sizeof *f);
    for (i = 0; i < COUNT(f->lengths); i++)
        f->lengths[i] = harness_between(&rng, 1, harness_chance(&rng, 0.05) ? 9000 : 500);
    f->lengths[37] = 12345; /* the longest */
    f->gpu = *cf_gpu_find("h100-80g");
    f->desc.model = &small;
    f->desc.gpu = &f->gpu;
    f->desc.parallel.pp = 3;
    f->desc.parallel.recompute = CF_RECOMPUTE_NONE;
    f->desc.chunk_sizes = sizes;
    f->desc.n_chunk_sizes = COUNT(sizes);
    f->desc.ks = ks;
    f->desc.n_ks = COUNT(ks);
    f->desc.kinds = kinds;
    f->desc.n_kinds = COUNT(kinds);
    f->desc.memory.runtime_bytes = 1 << 20;
    f->desc.limit_bytes = (int64_t)1 << 40;
    f->desc.batch = 30;
    f->desc.n_batches = 4;
    f->desc.max_tries = 10;
    f->desc.seed = seed;
    f->desc.n_exact = 10;
    f->desc.tolerance = -1;
}

/* Makes a forest: prompts with answers, some with a second turn, in the order in which trees are walked. */
static void fixture_plant(fixture *f, uint64_t seed) {
    harness_rng rng = {seed};
    int64_t i, end, prompt = 0, turn = 0, of_turn = 0;
    f->desc.pack.shared_prefixes = f->shares;
    for (i = end = 0; i < COUNT(f->lengths); i++) {
        int begins = i == end, turns = begins || harness_chance(&rng, 0.3);
        if (begins) end = i + harness_between(&rng, 1, 9);
        if (begins) prompt = harness_between(&rng, 128, harness_chance(&rng, 0.2) ? 3000 : 600);
        if (turns) turn = i, of_turn = prompt + harness_between(&rng, 128, 900);
        f->prompt[i] = begins ? i : f->prompt[i - 1];
        f->turn[i] = turn;
        f->lengths[i] = of_turn + harness_between(&rng, 0, 700);
        f->shares[i].with = turns ? f->prompt[i] : turn;
        f->shares[i].tokens = begins ? 0 : turns ? prompt : of_turn;
    }
}

static cf_tuning *tune(const fixture *f) {
    cf_tuning *tuning = NULL;
    cf_error error;
    if (cf_tune(f->lengths, COUNT(f->lengths), &f->desc, &tuning, &error) != CF_OK) FAIL("%s", error.text);
    return tuning;
}

/* ---- brute force ---- */

static cf_shared_prefix drawn_shares[MOST_BATCHES + 1][MOST_BATCH];

/* Returns the number of tokens with which both sequences begin. */
static int64_t common_tokens(const fixture *f, int64_t a, int64_t b) {
    int64_t other = f->turn[a] == f->prompt[a] ? f->turn[b] : f->turn[a], i;
    if (f->desc.pack.shared_prefixes == NULL || f->prompt[a] != f->prompt[b]) return 0;
    if (f->turn[a] != f->turn[b]) return f->shares[other].tokens;
    for (i = f->turn[a] + 1; i != a && i != b; i++) continue;
    return f->shares[i].tokens;
}

/* Returns the longest prefix that the last sequence at places 0 .. i of a batch shares with an earlier one; of several,
   the first. A tree drawn a second time is another tree. */
static cf_shared_prefix share_of(const fixture *f, const int64_t *ids, int64_t i) {
    cf_shared_prefix most = {0, 0};
    int64_t j = i;
    while (j > 0 && ids[j] != f->prompt[ids[j]]) j--;
    for (; j < i; j++)
        if (common_tokens(f, ids[j], ids[i]) > most.tokens) {
            most.with = j;
            most.tokens = common_tokens(f, ids[j], ids[i]);
        }
    return most;
}

/* Draws batches as cf_tune's comment describes, from splitmix64, which the harness uses as well: a shuffled list,
   shuffled again when exhausted, tree by tree. Batch n_batches is the first one with the longest length of all in place
   of its own. */
static void draw(const fixture *f, int64_t batches[MOST_BATCHES + 1][MOST_BATCH]) {
    int64_t deck[100], ids[MOST_BATCHES * MOST_BATCH], n = 0, at = 0, b, i, id, longest = 0;
    const int64_t size = f->desc.batch, count = f->desc.n_batches * size;
    harness_rng rng = {f->desc.seed};
    for (i = 0; i < COUNT(f->lengths); i++)
        if (f->desc.pack.shared_prefixes == NULL || f->prompt[i] == i) deck[n++] = i;
    for (i = 0; i < count;) {
        int64_t pick = harness_between(&rng, at, n - 1), taken = deck[pick];
        deck[pick] = deck[at];
        deck[at] = taken;
        for (id = taken; i < count && id < COUNT(f->lengths); id++)
            if (id == taken || common_tokens(f, taken, id) > 0) ids[i++] = id;
            else break;
        if (++at == n) at = 0;
    }
    for (i = 0; i < count; i++) {
        batches[i / size][i % size] = f->lengths[ids[i]];
        if (f->desc.pack.shared_prefixes != NULL)
            drawn_shares[i / size][i % size] = share_of(f, &ids[i / size * size], i % size);
    }
    b = f->desc.n_batches;
    memcpy(batches[b], batches[0], sizeof batches[b]);
    memcpy(drawn_shares[b], drawn_shares[0], sizeof drawn_shares[b]);
    for (i = 0; i < size; i++)
        if (batches[b][i] > batches[b][longest]) longest = i;
    batches[b][longest] = 0;
    for (i = 0; i < COUNT(f->lengths); i++)
        if (f->lengths[i] > batches[b][longest]) batches[b][longest] = f->lengths[i];
}

static int64_t chain_after(const cf_plan *plan, const cf_chunk *c) {
    return c->chain < 0 ? 0 : plan->chains[c->chain].n_chunks - 1 - c->index;
}

/* Counts the load of one virtual stage while action `at` of the list runs, from the definitions: it looks at every
   chunk. */
static cf_memory_load held_at(const cf_plan *plan, const cf_schedule *schedule, int64_t first, int64_t at, int64_t v) {
    cf_memory_load load = {0};
    int64_t c, id;
    for (c = schedule->shape.rank * plan->chunks_per_rank; c < (schedule->shape.rank + 1) * plan->chunks_per_rank;
         c++) {
        const cf_chunk *chunk = &plan->chunks[c];
        int forward = 0, kept = 0, dropped = 0, replayed = 0, backward = 0, finished = 0, chain_back = 0, own_back = 0;
        for (id = first; id <= at; id++) {
            const cf_action *a = &schedule->actions[id];
            int now = id == at, back = a->pass == CF_B || a->pass == CF_I;
            if (a->stage != v) continue;
            if (chunk->chain >= 0 && back && plan->chunks[a->chunk].chain == chunk->chain &&
                chain_after(plan, &plan->chunks[a->chunk]) == 0)
                chain_back = 1;
            if (a->chunk != c) continue;
            if (a->pass == CF_F) forward = 1, kept = a->keep, dropped = !a->keep;
            if (a->pass == CF_R) replayed = !now || !schedule->shape.outputs, kept = 1;
            if (back && !now) own_back = 1;
            if ((a->pass == CF_B || a->pass == CF_W) && !now) finished = 1;
            if (back) backward = 1;
        }
        (void)backward;
        if (kept && !finished) load.live_tokens += chunk->rows;
        if (chunk->chain >= 0 && forward && !own_back) load.state_tokens += plan->slices[chunk->first_slice].length;
        if (chunk->chain >= 0 && chain_back && !own_back)
            load.state_gradient_tokens += plan->slices[chunk->first_slice].length;
        if (schedule->shape.replay == CF_REPLAY_LOCAL && dropped && !replayed) load.input_tokens += chunk->rows;
    }
    if (schedule->actions[at].stage == v) load.chunk_tokens = plan->chunks[schedule->actions[at].chunk].rows;
    return load;
}

/* Returns the largest bytes on any stage at any action. */
static int64_t peak_bytes(const fixture *f, const cf_parallel *split, const cf_tune_candidate *c, const cf_plan *plan,
                          const cf_schedule *schedule) {
    cf_memory_desc memory = f->desc.memory;
    cf_memory_load loads[MOST_STAGES];
    cf_memory_report reports[MOST_STAGES];
    int64_t n_v = schedule->shape.n_stages * schedule->shape.n_virtual, s, v, id, most = 0;
    cf_error error;
    memory.model = f->desc.model;
    memory.parallel = *split;
    memory.outputs = c->outputs;
    for (v = 0; v < COUNT(f->lengths) && c->max_cp > 0; v++)
        if (f->lengths[v] > memory.gathered) memory.gathered = f->lengths[v];
    for (s = 0; s < schedule->shape.n_stages; s++)
        for (id = schedule->first[s]; id < schedule->first[s + 1]; id++) {
            memset(loads, 0, sizeof loads);
            for (v = 0; v < n_v; v++)
                if (naive_stage(schedule, v) == s) loads[v] = held_at(plan, schedule, schedule->first[s], id, v);
            if (cf_memory_estimate(&memory, loads, n_v, reports, schedule->shape.n_stages, &error) != CF_OK)
                FAIL("%s", error.text);
            if (reports[s].total > most) most = reports[s].total;
        }
    return most;
}

typedef struct outcome {
    double seconds; /* mean */
    double each[MOST_BATCHES];
    int64_t bytes;
} outcome;

/* Packs, schedules and simulates without a limit; in lockstep, the columns of all ranks. with_memory: also counts
   memory slowly. */
static outcome brute_force(const fixture *f, const cf_tuning *tuning, const cf_tune_candidate *c,
                           int64_t batches[MOST_BATCHES + 1][MOST_BATCH], int with_memory) {
    const cf_parallel *split = &tuning->splits[c->split];
    outcome out = {0};
    double sum = 0;
    int64_t b, rank;
    for (b = 0; b <= f->desc.n_batches; b++) {
        cf_pack_desc pack = f->desc.pack;
        cf_cost_desc cost = {0};
        cf_stage_cost stages[MOST_STAGES];
        cf_timing timing;
        cf_plan *plan = NULL, *packed = NULL;
        cf_error error;
        double step, slowest = 0;
        pack.chunk_size = c->chunk_size;
        pack.n_ranks = split->dp;
        if (c->in_step) pack.lockstep = 1;
        if (pack.shared_prefixes != NULL) pack.shared_prefixes = drawn_shares[b];
        cost.model = f->desc.model;
        cost.gpu = f->desc.gpu;
        cost.parallel = *split;
        cost.chunk_size = c->chunk_size;
        pack.max_cp = cost.max_cp = c->max_cp;
        cost.outputs = c->outputs;
        if (cf_cost_estimate(&cost, stages, split->pp * split->n_virtual, &timing, &step, &error) != CF_OK) {
            FAIL("%s", error.text);
            return out;
        }
        if (c->max_cp > 0) cf_cp_costs(&timing, &pack);
        if (cf_pack(batches[b], f->desc.batch, &pack, &plan, &error) != CF_OK) {
            FAIL("%s", error.text);
            return out;
        }
        if (c->in_step) {
            const cf_pass_cost priced = cf_column_cost(&timing, c->max_cp, split->pp * split->n_virtual);
            packed = plan;
            CHECK_INT(cf_lockstep_plan(packed, &priced, NULL, &plan, &error), CF_OK);
        }
        for (rank = 0; rank < plan->n_ranks; rank++) {
            cf_schedule_desc order = {0};
            cf_simulate_desc simulate = {0};
            cf_schedule *schedule = NULL;
            cf_timeline *timeline = NULL;
            order.kind = c->kind;
            order.shape.replay = c->replay;
            order.shape.outputs = c->outputs > 0;
            order.shape.k = c->k;
            order.shape.n_stages = split->pp;
            order.shape.n_virtual = split->n_virtual;
            order.shape.placement = split->placement;
            order.shape.rank = rank;
            order.timing = simulate.timing = &timing;
            order.limits.chunks = CF_NO_LIMIT;
            order.split_backward = c->kind == CF_SCHEDULE_BEST && f->desc.split_backward;
            order.max_tries = f->desc.max_tries;
            simulate.no_bounds = 1;
            if (cf_schedule_make(plan, &order, &schedule, &error) != CF_OK ||
                cf_simulate(plan, schedule, &simulate, &timeline, &error) != CF_OK) {
                FAIL("%s", error.text);
            } else {
                int64_t bytes = with_memory ? peak_bytes(f, split, c, plan, schedule) : 0;
                if (timeline->makespan > slowest) slowest = timeline->makespan;
                if (bytes > out.bytes) out.bytes = bytes;
            }
            cf_timeline_free(timeline);
            cf_schedule_free(schedule);
        }
        cf_plan_free(plan);
        cf_plan_free(packed);
        if (b == f->desc.n_batches) continue;
        out.each[b] = slowest + step;
        sum += out.each[b];
    }
    out.seconds = sum / (double)f->desc.n_batches;
    return out;
}

static int same(double a, double b) { return a >= b && a <= b; }

/* Compares a whole search with all its candidates, tried one by one with enough memory. */
static void check_against_brute_force(const fixture *f) {
    static int64_t batches[MOST_BATCHES + 1][MOST_BATCH];
    cf_tuning *tuning = tune(f);
    int64_t i, best = -1, n_dominated = 0;
    double best_seconds = 0, last;
    REQUIRE(tuning != NULL);
    draw(f, batches);
    CHECK(tuning->winner >= 0 && tuning->n_ranked > 0 && !tuning->interrupted);
    last = tuning->candidates[tuning->ranking[tuning->n_ranked < f->desc.n_exact ? tuning->n_ranked - 1
                                                                                : f->desc.n_exact - 1]].seconds;
    for (i = 0; i < tuning->n_candidates; i++) {
        const cf_tune_candidate *c = &tuning->candidates[i];
        outcome o;
        if (c->state_window > 0) { /* it fits without a window, so a window can be no better */
            CHECK_INT(c->status, CF_TUNE_DOMINATED);
            continue;
        }
        o = brute_force(f, tuning, c, batches, 0);
        harness_note("candidate %d: ChunkSize %d K %d %s %s", (int)i, (int)c->chunk_size, (int)c->k,
                     cf_schedule_kind_name(c->kind), cf_replay_name(c->replay));
        if (best < 0 || o.seconds < best_seconds) {
            best = i;
            best_seconds = o.seconds;
        }
        CHECK(o.seconds >= c->bound * (1 - 1e-9));
        if (c->status == CF_TUNE_OK) {
            CHECK(same(o.seconds, c->seconds));
            CHECK(memcmp(o.each, &tuning->seconds[i * tuning->n_batches],
                         (size_t)tuning->n_batches * sizeof(double)) == 0);
            CHECK(!c->limited);
        } else if (CHECK_INT(c->status, CF_TUNE_DOMINATED)) {
            n_dominated++;
            if (c->same_as >= 0 && tuning->candidates[c->same_as].status == CF_TUNE_OK)
                CHECK(same(o.seconds, tuning->candidates[c->same_as].seconds));
            else CHECK(o.seconds >= last * (1 - 1e-8));
            CHECK(c->why[0] != '\0');
        }
    }
    harness_note("%s", "");
    CHECK_INT(tuning->winner, best);
    CHECK(same(tuning->candidates[tuning->winner].seconds, best_seconds));
    CHECK(n_dominated > 0);
    for (i = 0; i < tuning->n_ranked; i++)
        CHECK(i == 0 ||
              tuning->candidates[tuning->ranking[i]].seconds >= tuning->candidates[tuning->ranking[i - 1]].seconds);
    cf_tuning_free(tuning);
}

TEST(equals_brute_force) {
    uint64_t seed;
    for (seed = (uint64_t)harness_rounds(1, 3); seed <= 3; seed++) {
        fixture f;
        fixture_fill(&f, seed);
        f.desc.n_exact = (int64_t)seed;
        check_against_brute_force(&f);
        f.desc.replays = both;
        f.desc.n_replays = 2;
        f.desc.n_kinds = 1; /* paper, the only kind that has both */
        check_against_brute_force(&f);
    }
}

/* Lists whose sequences share rows. Whole trees are drawn, except one that continues in the next batch. */
TEST(equals_brute_force_on_trees) {
    uint64_t seed;
    for (seed = (uint64_t)harness_rounds(1, 3); seed <= 3; seed++) {
        fixture f;
        fixture_fill(&f, seed);
        fixture_plant(&f, seed);
        f.desc.parallel.pp = (int64_t)seed;
        f.desc.n_exact = (int64_t)seed;
        check_against_brute_force(&f);
    }
}

TEST(equals_brute_force_on_ranks) {
    fixture f;
    cf_tuning *tuning;
    int64_t i;
    fixture_fill(&f, 7);
    f.desc.n_exact = 1;
    f.desc.parallel.pp = 2;
    f.desc.parallel.dp = 3;
    f.desc.batch = harness_rounds(30, 15);
    check_against_brute_force(&f);
    for (i = 0; i < COUNT(f.lengths); i++) f.lengths[i] = f.lengths[0]; /* equal ranks: one represents all */
    f.desc.batch = 12;
    check_against_brute_force(&f);
    f.desc.n_exact = CF_MAX_CANDIDATES;
    tuning = tune(&f);
    REQUIRE(tuning != NULL);
    for (i = 0; i < tuning->n_candidates; i++) CHECK_INT(tuning->candidates[i].peak_rank, 0);
    CHECK(tuning->n_simulated <= tuning->n_candidates * (tuning->n_batches + 1));
    cf_tuning_free(tuning);
}

/* Cp groups of each width that divides the ranks compete with none: on one stage with `paper` schedules for any
   requested kind, on several with all kinds. The giants of the list are spread. Times, memory with the gathered layer,
   and schedules match a count by hand. */
TEST(equals_brute_force_with_cp_groups) {
    static int64_t batches[MOST_BATCHES + 1][MOST_BATCH];
    const cf_tune_candidate *c;
    cf_tuning *tuning;
    cf_error error;
    fixture f;
    int64_t i, n_over_stages = 0, fast = -1;
    fixture_fill(&f, 7);
    f.desc.n_exact = 3;
    f.desc.parallel.pp = 1;
    f.desc.parallel.dp = 4;
    f.desc.pack.max_cp = 4;
    f.desc.n_kinds = 2;
    check_against_brute_force(&f);
    tuning = tune(&f);
    REQUIRE(tuning != NULL && tuning->n_splits == 3);
    draw(&f, batches);
    for (i = 0; i < 3; i++) CHECK_INT(tuning->max_cps[i], 2 * i);
    for (i = 0; i < tuning->n_candidates; i++) {
        c = &tuning->candidates[i];
        CHECK_INT(c->max_cp, tuning->max_cps[c->split]);
        CHECK(c->max_cp == 0 || c->kind == CF_SCHEDULE_PAPER);
    }
    c = &tuning->candidates[tuning->winner];
    CHECK(c->max_cp > 0);
    CHECK_INT(c->bytes, brute_force(&f, tuning, c, batches, 1).bytes);
    cf_tuning_free(tuning);
    for (i = 0; i < 2; i++) {
        f.desc.parallel.dp = i == 0 ? 3 : 4;
        f.desc.pack.max_cp = i == 0 ? 4 : 3;
        tuning = tune(&f);
        REQUIRE(tuning != NULL);
        CHECK_INT(tuning->n_splits, 1 + i);
        cf_tuning_free(tuning);
    }
    f.desc.parallel.pp = 2;
    f.desc.n_ks = 1;
    check_against_brute_force(&f);
    tuning = tune(&f);
    REQUIRE(tuning != NULL && tuning->n_splits == 2);
    for (i = 0; i < tuning->n_candidates; i++) {
        c = &tuning->candidates[i];
        CHECK_INT(c->kind, f.desc.kinds[i / 2 % f.desc.n_kinds]);
        if (c->max_cp > 0 && c->status == CF_TUNE_OK) n_over_stages++, fast = i;
    }
    REQUIRE(n_over_stages > 0);
    c = &tuning->candidates[fast];
    CHECK_INT(c->bytes, brute_force(&f, tuning, c, batches, 1).bytes);
    cf_tuning_free(tuning);
    f.desc.kinds = &kinds[2]; /* the first kind splits backwards, which cp groups cannot */
    tuning = tune(&f);
    REQUIRE(tuning != NULL && tuning->n_splits == 2);
    for (i = 0; i < tuning->n_candidates; i++) {
        c = &tuning->candidates[i];
        CHECK(c->max_cp == 0 || c->kind == CF_SCHEDULE_BEST || c->status == CF_TUNE_DOMINATED);
    }
    cf_tuning_free(tuning);
    f.desc.pack.max_cp = -1;
    CHECK_INT(cf_tune(f.lengths, COUNT(f.lengths), &f.desc, &tuning, &error), CF_ERROR_ARGUMENT);
    CHECK_STR(error.field, "pack.max_cp");
}

/* If no ChunkSizes are given, the longest sequence is one of them, once and in order. With it nothing is split, so the
   result is no slower than 1F1B on packed sequences. */
TEST(the_longest_sequence_is_a_chunk_size) {
    static const int64_t longest[] = {4096, 12345, 4097, 131073, 700}, one_k = 1;
    static const int64_t wanted[] = {8, 9, 9, 9, 9}, place[] = {2, 4, 3, 8, 0};
    static const cf_schedule_kind best = CF_SCHEDULE_BEST, plain = CF_SCHEDULE_1F1B;
    int i;
    for (i = 0; i < COUNT(longest); i++) {
        int64_t align = i == 1 ? 128 : 0, size = i == 1 ? 12416 : longest[i], j;
        cf_tuning *tuning, *unsplit;
        fixture f;
        fixture_fill(&f, 13);
        for (j = 0; j < COUNT(f.lengths); j++) f.lengths[j] = f.lengths[j] % 700 + 1;
        f.lengths[37] = longest[i];
        f.desc.chunk_sizes = NULL;
        f.desc.n_chunk_sizes = 0;
        f.desc.ks = &one_k;
        f.desc.kinds = &best;
        f.desc.n_ks = f.desc.n_kinds = f.desc.no_stream = f.desc.no_outputs = 1;
        f.desc.pack.align = align;
        tuning = tune(&f);
        REQUIRE(tuning != NULL);
        CHECK_INT(tuning->n_candidates, wanted[i]);
        REQUIRE(place[i] < tuning->n_candidates);
        CHECK_INT(tuning->candidates[place[i]].chunk_size, size);
        for (j = 1; j < tuning->n_candidates; j++)
            CHECK(tuning->candidates[j].chunk_size > tuning->candidates[j - 1].chunk_size);
        f.desc.chunk_sizes = &size;
        f.desc.n_chunk_sizes = 1;
        f.desc.kinds = &plain;
        unsplit = tune(&f);
        REQUIRE(unsplit != NULL);
        CHECK(tuning->candidates[tuning->winner].seconds <= unsplit->candidates[unsplit->winner].seconds * (1 + 1e-12));
        cf_tuning_free(unsplit);
        cf_tuning_free(tuning);
    }
}

TEST(equals_brute_force_on_splits) {
    fixture f;
    fixture_fill(&f, 9);
    f.desc.n_exact = 2;
    f.desc.parallel.pp = 0;
    f.desc.n_gpus = 4;
    f.desc.n_kinds = 2;
    f.desc.n_chunk_sizes = 2;
    check_against_brute_force(&f);
}

TEST(equals_brute_force_on_virtual_stages) {
    static const cf_schedule_kind virtual_kinds[] = {CF_SCHEDULE_INTERLEAVED, CF_SCHEDULE_BEST};
    static const cf_schedule_kind turning_kinds[] = {CF_SCHEDULE_ZERO_BUBBLE, CF_SCHEDULE_BEST};
    fixture f;
    fixture_fill(&f, 11);
    f.desc.n_exact = 1;
    f.desc.parallel.pp = 2;
    f.desc.parallel.n_virtual = 2;
    f.desc.kinds = virtual_kinds;
    f.desc.n_kinds = 2;
    f.desc.batch = harness_rounds(30, 15);
    check_against_brute_force(&f);
    f.desc.kinds = turning_kinds; /* in a V, whose first stage also has the head */
    f.desc.parallel.placement = CF_PLACEMENT_V;
    f.desc.split_backward = 1;
    f.desc.n_chunk_sizes = 2;
    check_against_brute_force(&f);
}

/* ---- memory ---- */

/* The terms of a report add up to its total, and the total equals a candidate's bytes within one byte of rounding per
   term. */
static void check_terms(const cf_memory_report *memory, int64_t bytes) {
    int64_t sum = 0, n = 0;
#define ADD_TERM(name, text) sum += memory->name, n++;
    CF_MEMORY_TERMS(ADD_TERM)
#undef ADD_TERM
    CHECK_INT(sum, memory->total);
    CHECK(memory->total <= bytes + n && memory->total >= bytes - n);
}

/* Compares every exact candidate's peak with the slow count. */
static void check_peaks(const fixture *f) {
    static int64_t batches[MOST_BATCHES + 1][MOST_BATCH];
    cf_tuning *tuning = tune(f);
    int64_t i, checked = 0;
    REQUIRE(tuning != NULL);
    draw(f, batches);
    for (i = 0; i < tuning->n_candidates; i++) {
        const cf_tune_candidate *c = &tuning->candidates[i];
        if (c->status != CF_TUNE_OK || c->limited || c->state_window > 0) continue;
        harness_note("candidate %d: ChunkSize %d K %d %s %s", (int)i, (int)c->chunk_size, (int)c->k,
                     cf_schedule_kind_name(c->kind), cf_replay_name(c->replay));
        CHECK_INT(c->bytes, brute_force(f, tuning, c, batches, 1).bytes);
        CHECK_INT(c->bytes, c->memory.total);
        checked++;
    }
    harness_note("%s", "");
    CHECK(checked > 3);
    cf_tuning_free(tuning);
}

TEST(peak_is_the_walk_s) {
    static const int64_t few_sizes[] = {512, 1024};
    fixture f;
    fixture_fill(&f, 5);
    f.desc.chunk_sizes = few_sizes;
    f.desc.n_chunk_sizes = 2;
    f.desc.n_batches = 2;
    f.desc.batch = harness_rounds(20, 5);
    f.desc.n_exact = CF_MAX_CANDIDATES;
    check_peaks(&f);
    f.desc.replays = both;
    f.desc.n_replays = 2;
    f.desc.n_kinds = 1; /* paper */
    check_peaks(&f);
    f.desc.replays = NULL;
    f.desc.n_replays = 0;
    f.desc.parallel.pp = 2;
    f.desc.parallel.n_virtual = 2;
    f.desc.kinds = NULL;
    f.desc.n_kinds = 0;
    check_peaks(&f);
    f.desc.parallel.placement = CF_PLACEMENT_V;
    check_peaks(&f);
}

/* Lowers the limit from one at which everything fits to one at which nothing does. An exact candidate fits, and an
   infeasible one needs more than the limit. One that was exact without a limit and fits is unchanged. */
static void check_limits(fixture *f, int64_t first) {
    cf_tuning *free_of_it, *held;
    int64_t most = 0, least = INT64_MAX, i, step, limited = 0, infeasible = 0;
    f->desc.n_exact = CF_MAX_CANDIDATES;
    f->desc.no_stream = 1;
    f->desc.n_batches = 2;
    f->desc.memory.fragmentation = -1;
    free_of_it = tune(f);
    REQUIRE(free_of_it != NULL);
    for (i = 0; i < free_of_it->n_candidates; i++) {
        if (free_of_it->candidates[i].status != CF_TUNE_OK) continue;
        if (free_of_it->candidates[i].bytes > most) most = free_of_it->candidates[i].bytes;
        if (free_of_it->candidates[i].bytes < least) least = free_of_it->candidates[i].bytes;
    }
    for (step = harness_rounds(0, (int)first); step < 8; step += harness_rounds(1, 3)) {
        f->desc.limit_bytes = least / 2 + (most - least / 2) * step / 7;
        held = NULL;
        harness_note("limit %lld", (long long)f->desc.limit_bytes);
        if (cf_tune(f->lengths, COUNT(f->lengths), &f->desc, &held, NULL) != CF_OK) continue;
        for (i = 0; i < held->n_candidates; i++) {
            const cf_tune_candidate *c = &held->candidates[i], *before = &free_of_it->candidates[i];
            if (c->status == CF_TUNE_OK) CHECK(c->bytes <= f->desc.limit_bytes);
            if (c->status == CF_TUNE_OK && c->limited)
                CHECK(before->status != CF_TUNE_OK || before->bytes > f->desc.limit_bytes);
            if (c->status == CF_TUNE_INFEASIBLE) {
                CHECK(c->bytes > f->desc.limit_bytes);
                check_terms(&c->memory, c->bytes);
                infeasible++;
            }
            if (before->status == CF_TUNE_OK && before->bytes <= f->desc.limit_bytes) {
                CHECK_INT(c->status, CF_TUNE_OK);
                CHECK(same(c->seconds, before->seconds));
                CHECK_INT(c->bytes, before->bytes);
            }
            limited += c->limited && c->status == CF_TUNE_OK;
        }
        if (held->winner < 0) CHECK(held->smallest_limit > f->desc.limit_bytes && held->smallest_limit <= least);
        else CHECK_INT(held->smallest_limit, 0);
        cf_tuning_free(held);
    }
    harness_note("%s", "");
    CHECK(limited > 0 && infeasible > 0);
    cf_tuning_free(free_of_it);
}

TEST(limit_is_kept) {
    fixture f;
    fixture_fill(&f, 3);
    check_limits(&f, 0);
}

TEST(limit_is_kept_by_trees) {
    fixture f;
    fixture_fill(&f, 9);
    fixture_plant(&f, 9);
    f.desc.n_ks = 3;
    f.desc.max_tries = 6;
    check_limits(&f, 1);
}

/* If a limit is below the model's states, nothing fits, and the error names a limit that is enough. */
TEST(limit_below_the_parameters) {
    fixture f;
    cf_tuning *tuning;
    fixture_fill(&f, 3);
    f.desc.limit_bytes = 1000;
    tuning = tune(&f);
    REQUIRE(tuning != NULL);
    CHECK_INT(tuning->winner, -1);
    CHECK_INT(tuning->n_ranked, 0);
    CHECK(tuning->smallest_limit > (1 << 20) + 18 * 700000);
    f.desc.limit_bytes = tuning->smallest_limit - 1;
    cf_tuning_free(tuning);
    tuning = tune(&f);
    REQUIRE(tuning != NULL);
    CHECK_INT(tuning->winner, -1);
    cf_tuning_free(tuning);
}

/* With a window every candidate holds the ring and no other state, however long the sequence (12,345 tokens). If memory
   forbids all candidates that keep the state, some with a window remain. */
TEST(a_window_makes_room) {
    enum { WINDOW = 300 };
    static const cf_model heavy = {"heavy", 8, 64, 8, 8, 64, 128, 500, 0, 0, 0, 0, 0, 0, NULL, 0, NULL, 0, 0, 0};
    fixture f;
    cf_tuning *plain, *streamed;
    int64_t i, least = INT64_MAX, n = 0, gained = 0;
    fixture_fill(&f, 9);
    f.desc.model = &heavy; /* a row of one layer: 8 K heads of 64, so 2048 bytes of K and V, 4096 of gradients */
    f.desc.parallel.recompute = CF_RECOMPUTE_FULL;
    f.desc.n_exact = CF_MAX_CANDIDATES;
    f.desc.n_batches = harness_rounds(2, 1);
    f.desc.memory.fragmentation = -1;
    f.desc.no_stream = 1;
    plain = tune(&f);
    f.desc.memory.state_window = WINDOW;
    f.desc.no_stream = 0;
    streamed = tune(&f);
    REQUIRE(plain != NULL && streamed != NULL);
    CHECK_INT(streamed->n_candidates, plain->n_candidates);
    for (i = 0; i < streamed->n_candidates; i++) {
        const cf_tune_candidate *c = &streamed->candidates[i], *before = &plain->candidates[i];
        if (before->status == CF_TUNE_OK && before->bytes < least) least = before->bytes;
        if (c->status != CF_TUNE_OK || before->status != CF_TUNE_OK) continue;
        CHECK_INT(c->memory.state, WINDOW * 2048);
        CHECK_INT(c->memory.state_gradient, WINDOW * 4096);
        CHECK(c->memory.host > 10 * (c->memory.state + c->memory.state_gradient));
        CHECK(c->memory.inputs <= 2 * c->chunk_size * 128); /* two stage inputs */
        check_terms(&c->memory, c->bytes);
        n++;
    }
    CHECK(n > 3);
    cf_tuning_free(streamed);
    cf_tuning_free(plain);
    f.desc.limit_bytes = least - 1; /* nothing fits without */
    streamed = tune(&f);
    REQUIRE(streamed != NULL);
    for (i = 0; i < streamed->n_candidates; i++) {
        if (streamed->candidates[i].status != CF_TUNE_OK) continue;
        CHECK(streamed->candidates[i].bytes <= f.desc.limit_bytes);
        gained++;
    }
    CHECK(gained > 0);
    cf_tuning_free(streamed);
}

/* Tunes Qwen2.5 7B on four GPUs of 80 GB, TP 2 and PP 2, with sequences of up to `longest` tokens. */
static cf_tuning *tune_7b(int64_t longest, int64_t state_window, int no_stream) {
    static const int64_t two_sizes[] = {8192, 32768}, one_k[] = {1};
    static const cf_schedule_kind one_kind[] = {CF_SCHEDULE_PAPER};
    int64_t lengths[24], i;
    cf_tune_desc desc = {0};
    cf_tuning *tuning = NULL;
    cf_error error;
    desc.model = cf_model_find("qwen2.5-7b");
    desc.gpu = cf_gpu_find("h100-80g");
    desc.parallel.tp = 2;
    desc.parallel.pp = 2;
    desc.parallel.recompute = CF_RECOMPUTE_NONE;
    desc.chunk_sizes = two_sizes;
    desc.n_chunk_sizes = COUNT(two_sizes);
    desc.ks = one_k;
    desc.kinds = one_kind;
    desc.n_ks = desc.n_kinds = 1;
    desc.batch = 12;
    desc.n_batches = 2;
    desc.n_exact = CF_MAX_CANDIDATES;
    desc.memory.state_window = state_window;
    desc.no_stream = no_stream;
    desc.no_outputs = 1;
    for (i = 0; i < COUNT(lengths); i++) lengths[i] = i == 5 ? longest : 1000 + 100 * i;
    if (!CHECK(cf_tune(lengths, COUNT(lengths), &desc, &tuning, &error) == CF_OK)) harness_note("%s", error.text);
    return tuning;
}

/* A million tokens fit only if state streams. Without streaming nothing fits, and the result equals that of a search in
   which all must stream. At 32K everything fits, and nothing streams. */
TEST(streams_where_memory_forbids_the_rest) {
    cf_tuning *stays = tune_7b(1 << 20, 0, 1), *streams = tune_7b(1 << 20, CF_TUNE_WINDOW, 0);
    cf_tuning *chosen = tune_7b(1 << 20, 0, 0), *shorter = tune_7b(1 << 15, 0, 0);
    const cf_tune_candidate *best, *wanted;
    int64_t i, n = 0;
    REQUIRE(stays != NULL && streams != NULL && chosen != NULL && shorter != NULL);
    CHECK_INT(stays->winner, -1);
    REQUIRE(chosen->winner >= 0 && streams->winner >= 0 && shorter->winner >= 0);
    best = &chosen->candidates[chosen->winner];
    wanted = &streams->candidates[streams->winner];
    CHECK_INT(best->state_window, CF_TUNE_WINDOW);
    CHECK_INT(best->chunk_size, wanted->chunk_size);
    CHECK(same(best->seconds, wanted->seconds));
    CHECK_INT(best->bytes, wanted->bytes);
    CHECK(best->bytes <= chosen->limit_bytes);
    CHECK(best->waiting > 0 && best->waiting < 0.1);
    CHECK(best->memory.host > (int64_t)30 << 30);
    CHECK_INT(best->memory.state, CF_TUNE_WINDOW * 2 * 256 * 2); /* two K heads on each GPU */
    for (i = 0; i < shorter->n_candidates; i++) {
        const cf_tune_candidate *c = &shorter->candidates[i];
        if (c->state_window == 0 || c->chunk_size > 8192) continue;
        CHECK_INT(c->status, CF_TUNE_DOMINATED);
        CHECK_STR(c->why, "it fits without");
        n++;
    }
    CHECK_INT(n, 1);
    CHECK_INT(shorter->candidates[shorter->winner].state_window, 0);
    CHECK(same(shorter->candidates[shorter->winner].waiting, 0));
    cf_tuning_free(shorter);
    cf_tuning_free(chosen);
    cf_tuning_free(streams);
    cf_tuning_free(stays);
}

/* If the recomputation level is not given, the search tries the cheapest first. It simulates a level only if the one
   before did not fit or needed a limit, with the same result as if the level was given. */
TEST(recomputes_where_memory_forbids_the_rest) {
    static const cf_recompute whats[] = {CF_RECOMPUTE_NONE, CF_RECOMPUTE_ACT, CF_RECOMPUTE_MLP, CF_RECOMPUTE_MLP,
                                         CF_RECOMPUTE_FULL, CF_RECOMPUTE_FULL};
    static const int64_t layers[] = {0, 0, 2, 0, 0, 0}; /* half of a stage's four layers */
    cf_tuning *found, *asked[COUNT(whats)];
    int64_t i, level, simulated = 0, spared = 0, fixed;
    fixture f;
    fixture_fill(&f, 5);
    f.desc.n_exact = CF_MAX_CANDIDATES;
    f.desc.n_kinds = 2;
    f.desc.no_stream = f.desc.no_outputs = 1;
    f.desc.limit_bytes = (int64_t)120 << 20;
    for (level = 0; level < COUNT(whats); level++) {
        f.desc.parallel.recompute = whats[level];
        f.desc.parallel.recompute_layers = layers[level];
        f.desc.memory.offload = level == COUNT(whats) - 1 ? CF_OFFLOAD_CHECKPOINTS : 0;
        asked[level] = tune(&f);
        REQUIRE(asked[level] != NULL);
    }
    f.desc.memory.offload = 0;
    f.desc.parallel.recompute = CF_RECOMPUTE_DEFAULT;
    f.desc.parallel.recompute_layers = 0;
    found = tune(&f);
    REQUIRE(found != NULL && found->winner >= 0);
    CHECK_INT(found->n_candidates, COUNT(whats) * asked[0]->n_candidates);
    for (i = 0; i < found->n_candidates; i++) {
        const cf_tune_candidate *c = &found->candidates[i], *own, *before;
        level = i % COUNT(whats);
        own = &asked[level]->candidates[i / COUNT(whats)];
        before = level > 0 ? &asked[level - 1]->candidates[i / COUNT(whats)] : NULL;
        CHECK_INT(c->recompute, whats[level]);
        CHECK_INT(c->recompute_layers, layers[level]);
        CHECK_INT(c->offload, level == COUNT(whats) - 1 ? CF_OFFLOAD_CHECKPOINTS : 0);
        if (strcmp(c->why, "it fits with less recomputation") == 0) {
            CHECK(before != NULL && !before->limited && before->status != CF_TUNE_INFEASIBLE);
            CHECK(c->same_as >= i - level && c->same_as < i);
            spared++;
        }
        if (c->status == CF_TUNE_OK && own->status == CF_TUNE_OK) {
            CHECK(same(c->seconds, own->seconds) && c->bytes == own->bytes);
            simulated += level > 0;
        }
        if (c->status == CF_TUNE_INFEASIBLE) CHECK_INT(own->status, CF_TUNE_INFEASIBLE);
    }
    CHECK(simulated > 5 && spared > 5);
    fixed = asked[0]->winner;
    CHECK(fixed < 0 || found->candidates[found->winner].seconds <= asked[0]->candidates[fixed].seconds);
    for (level = 0; level < COUNT(whats); level++) cf_tuning_free(asked[level]);
    cf_tuning_free(found);
}

/* Outputs are kept where they fit. A candidate keeps them on the GPU if every batch fits without a limit, else in host
   memory. If nothing is replayed, none are reported. Whatever fits without outputs also fits with outputs in host
   memory, and is no faster. */
TEST(keeps_outputs_where_they_fit) {
    enum { GPU, HOST, NONE, WAYS };
    cf_tuning *found, *asked[WAYS];
    const int64_t whole = 16384; /* longer than any sequence */
    int64_t i, way, n, with = 0, away = 0;
    fixture f;
    fixture_fill(&f, 5);
    f.desc.n_exact = CF_MAX_CANDIDATES;
    f.desc.n_kinds = 2;
    f.desc.no_stream = 1;
    f.desc.limit_bytes = (int64_t)150 << 20;
    found = tune(&f);
    for (way = 0; way < WAYS; way++) {
        f.desc.no_outputs = way == NONE;
        f.desc.memory.outputs = way == NONE ? 0 : (int)way + 1;
        asked[way] = tune(&f);
        REQUIRE(found != NULL && asked[way] != NULL && found->winner >= 0);
        CHECK_INT(found->n_candidates, asked[way]->n_candidates);
    }
    n = asked[GPU]->n_candidates;
    for (i = 0; i < n; i++) {
        const cf_tune_candidate *c = &found->candidates[i], *gpu = &asked[GPU]->candidates[i];
        const cf_tune_candidate *host = &asked[HOST]->candidates[i], *none = &asked[NONE]->candidates[i], *own = host;
        CHECK(c->k == gpu->k && c->kind == gpu->kind && c->chunk_size == gpu->chunk_size);
        CHECK_INT(c->status, host->status);
        if (c->status == CF_TUNE_INFEASIBLE) CHECK_INT(none->status, CF_TUNE_INFEASIBLE);
        if (c->status != CF_TUNE_OK) continue;
        if (gpu->status == CF_TUNE_OK && !gpu->limited) own = gpu;
        CHECK(same(c->seconds, own->seconds) && c->bytes == own->bytes && c->outputs == own->outputs);
        CHECK(memcmp(&c->memory, &own->memory, sizeof c->memory) == 0 && c->peak_batch == own->peak_batch);
        CHECK(none->status != CF_TUNE_OK || c->seconds <= none->seconds);
        with += c->outputs == 1;
        away += c->outputs == 2;
    }
    harness_report("outputs on the GPU of %d, in host memory %d", (int)with, (int)away);
    CHECK(with > 3 && away > 3);
    for (way = 0; way < WAYS; way++) {
        CHECK(asked[way]->winner < 0 || found->candidates[found->winner].seconds <=
                                            1.01 * asked[way]->candidates[asked[way]->winner].seconds);
        cf_tuning_free(asked[way]);
    }
    cf_tuning_free(found);
    f.desc.parallel.recompute = CF_RECOMPUTE_FULL;
    f.desc.no_outputs = 0;
    f.desc.memory.outputs = 1;
    CHECK_INT(cf_tune(f.lengths, COUNT(f.lengths), &f.desc, &found, NULL), CF_ERROR_ARGUMENT);
    f.desc.memory.outputs = 0;
    found = tune(&f);
    REQUIRE(found != NULL);
    CHECK_INT(found->n_candidates, n);
    cf_tuning_free(found);
    f.desc.parallel.recompute = CF_RECOMPUTE_NONE;
    f.desc.chunk_sizes = &whole;
    f.desc.n_chunk_sizes = 1;
    f.desc.limit_bytes = 0;
    found = tune(&f);
    REQUIRE(found != NULL && found->winner >= 0);
    for (i = 0; i < found->n_ranked; i++) CHECK_INT(found->candidates[found->ranking[i]].outputs, 0);
    cf_tuning_free(found);
}

/* ---- the race and the choice ---- */

/* Runs the pieces of a round from last to first: the results of one must not affect another. */
static void run_backwards(void *user, int64_t n, cf_tune_task task, void *context) {
    (void)user;
    while (n > 0) task(context, --n);
}

/* Returns the sorted ChunkSizes of a tuning, without the even ones. */
static const int64_t *tuned_sizes_without(const cf_tuning *tuning, int64_t *n) {
    static int64_t sizes_found[32];
    int64_t i;
    *n = 0;
    for (i = 0; i < tuning->n_candidates - tuning->n_even && *n < COUNT(sizes_found); i++)
        if (*n == 0 || sizes_found[*n - 1] < tuning->candidates[i].chunk_size)
            sizes_found[(*n)++] = tuning->candidates[i].chunk_size;
    return sizes_found;
}

static double fastest(const cf_tuning *tuning) { return tuning->candidates[tuning->ranking[0]].seconds; }

/* A race finds the fastest candidate in fewer simulations. Its estimates for candidates that it gave up are close. The
   answer does not depend on the order in which the pieces of a round run. */
TEST(a_race_finds_the_fastest) {
    uint64_t seed;
    for (seed = (uint64_t)harness_rounds(1, 3); seed <= 3; seed++) {
        cf_tuning *all, *race, *backwards;
        int64_t i, estimated = 0;
        double off = 0;
        fixture f;
        fixture_fill(&f, seed);
        f.desc.n_exact = CF_MAX_CANDIDATES;
        f.desc.limit_bytes = (int64_t)160 << 20;
        f.desc.no_stream = 1;
        all = tune(&f);
        f.desc.n_exact = 0;
        race = tune(&f);
        f.desc.run_tasks = run_backwards;
        backwards = tune(&f);
        REQUIRE(all != NULL && race != NULL && backwards != NULL && all->winner >= 0 && race->winner >= 0);
        CHECK(same(fastest(race), fastest(all)));
        CHECK(race->n_simulated < all->n_simulated);
        CHECK_INT(backwards->winner, race->winner);
        CHECK_INT(backwards->n_simulated, race->n_simulated);
        CHECK_INT(backwards->n_ranked, race->n_ranked);
        CHECK(memcmp(backwards->seconds, race->seconds,
                     (size_t)(race->n_candidates * race->n_batches) * sizeof(double)) == 0);
        for (i = 0; i < race->n_candidates; i++) {
            const cf_tune_candidate *c = &race->candidates[i], *exact = &all->candidates[i];
            if (exact->status == CF_TUNE_OK) CHECK(c->bound <= exact->seconds * (1 + 1e-9));
            if (c->status == CF_TUNE_OK) CHECK(same(c->seconds, exact->seconds) && c->bytes == exact->bytes);
            if (!(c->estimate > 0) || exact->status != CF_TUNE_OK) continue;
            CHECK_INT(c->status, CF_TUNE_DOMINATED);
            off += fabs(c->estimate / exact->seconds - 1);
            estimated++;
        }
        CHECK(estimated >= 1 && off / (double)estimated < 0.15);
        cf_tuning_free(backwards);
        cf_tuning_free(race);
        cf_tuning_free(all);
    }
}

/* Returns the winner's time in a race, if there is a winner. */
static double raced(const fixture *f) {
    cf_tuning *race = tune(f);
    double seconds = race != NULL && race->n_ranked > 0 ? fastest(race) : HUGE_VAL;
    cf_tuning_free(race);
    return seconds;
}

/* Only some batches have the long sequence, which takes most of the list's time. A candidate may be slow on the others
   and still be the fastest. More ChunkSizes and more memory must never give a slower winner. */
TEST(a_race_looks_at_long_sequences) {
    uint64_t seed;
    for (seed = 2; seed <= (uint64_t)harness_rounds(20, 2); seed++) {
        cf_tuning *all;
        int64_t i;
        double least = HUGE_VAL, race;
        fixture f;
        fixture_fill(&f, seed);
        f.lengths[37] = 40000;
        f.desc.parallel.pp = 4;
        f.desc.limit_bytes = (int64_t)4000 << 20;
        f.desc.no_stream = 1;
        f.desc.n_exact = CF_MAX_CANDIDATES;
        all = tune(&f);
        REQUIRE(all != NULL && all->n_ranked > 0);
        f.desc.n_exact = 0;
        race = raced(&f);
        CHECK(same(race, fastest(all)));
        cf_tuning_free(all);
        f.desc.limit_bytes = (int64_t)160 << 20;
        CHECK(race <= raced(&f));
        f.desc.limit_bytes = (int64_t)4000 << 20;
        f.desc.n_chunk_sizes = 1;
        for (i = 0; i < COUNT(sizes); i++) {
            double alone;
            f.desc.chunk_sizes = &sizes[i];
            alone = raced(&f);
            if (alone < least) least = alone;
        }
        CHECK(same(race, least));
    }
}

/* If no ChunkSizes are given, a race also tries some intermediate ones for the best split: other multiples of 128.
   Their times equal those of a search that is given them, and the winner is no slower. */
TEST(even_sizes_are_tried) {
    cf_tuning *tuning;
    cf_tune_desc given;
    int64_t i, j, fastest, exact = 0;
    fixture f;
    fixture_fill(&f, 3);
    f.desc.chunk_sizes = NULL;
    f.desc.n_chunk_sizes = 0;
    f.desc.no_stream = 1;
    REQUIRE((tuning = tune(&f)) != NULL);
    CHECK_INT(tuning->n_even, 0); /* n_exact applies to the listed sizes */
    cf_tuning_free(tuning);
    f.desc.n_exact = 0;
    REQUIRE((tuning = tune(&f)) != NULL && tuning->winner >= 0 && CHECK(tuning->n_even > 0));
    fastest = tuning->ranking[0];
    given = f.desc;
    for (i = tuning->n_candidates - tuning->n_even; i < tuning->n_candidates; i++) {
        const cf_tune_candidate *c = &tuning->candidates[i];
        cf_tuning *alone;
        CHECK_INT(c->chunk_size % 128, 0);
        for (j = 0; j < tuning->n_candidates - tuning->n_even; j++)
            CHECK(tuning->candidates[j].chunk_size != c->chunk_size);
        if (tuning->seconds[i * tuning->n_batches] < 0) continue;
        f.desc.chunk_sizes = &c->chunk_size;
        f.desc.n_chunk_sizes = 1;
        f.desc.n_exact = CF_MAX_CANDIDATES;
        REQUIRE((alone = tune(&f)) != NULL);
        for (j = 0; j < alone->n_candidates; j++) {
            const cf_tune_candidate *own = &alone->candidates[j];
            if (own->k != c->k || own->kind != c->kind || own->replay != c->replay || own->same_as >= 0) continue;
            CHECK(same(alone->seconds[j * alone->n_batches], tuning->seconds[i * tuning->n_batches]));
            if (c->status == CF_TUNE_OK) CHECK(same(own->seconds, c->seconds) && own->bytes == c->bytes);
            exact++;
        }
        cf_tuning_free(alone);
    }
    CHECK(exact > 0);
    f.desc = given;
    f.desc.chunk_sizes = tuned_sizes_without(tuning, &f.desc.n_chunk_sizes);
    CHECK_INT(f.desc.n_chunk_sizes, 9);
    {
        cf_tuning *without = tune(&f);
        REQUIRE(without != NULL && without->n_even == 0);
        CHECK(tuning->candidates[fastest].seconds <= without->candidates[without->ranking[0]].seconds);
        cf_tuning_free(without);
    }
    cf_tuning_free(tuning);
}

static int is_simpler(const cf_tune_candidate *a, const cf_tune_candidate *b) {
    int64_t x[5], y[5];
    int i;
    x[0] = a->state_window > 0, y[0] = b->state_window > 0;
    x[1] = a->replay != CF_REPLAY_LOCAL, y[1] = b->replay != CF_REPLAY_LOCAL;
    x[2] = a->outputs, y[2] = b->outputs;
    x[3] = a->kind == CF_SCHEDULE_BEST, y[3] = b->kind == CF_SCHEDULE_BEST;
    x[4] = a->k, y[4] = b->k;
    for (i = 0; i < 5; i++)
        if (x[i] != y[i]) return x[i] < y[i];
    return a->seconds < b->seconds;
}

static int is_beaten(const cf_tuning *tuning, const cf_tune_candidate *c) {
    int64_t j;
    for (j = 0; j < tuning->n_candidates; j++) {
        const cf_tune_candidate *other = &tuning->candidates[j];
        if (other->status == CF_TUNE_OK && other->seconds < c->seconds && other->bytes < c->bytes) return 1;
    }
    return 0;
}

/* With a tolerance the winner is not slower than it allows. No other candidate within it takes less memory by more than
   a twentieth of the limit, or is simpler in as much memory as the smallest. None is both faster and smaller. */
TEST(the_winner_is_thrifty_and_simple) {
    static const double tolerances[] = {0.002, 0.01, 0.1, 0.5};
    int64_t i, j, step, moved = 0, beaten = 0;
    fixture f;
    fixture_fill(&f, 4);
    f.desc.n_exact = CF_MAX_CANDIDATES;
    f.desc.n_batches = harness_rounds(2, 1);
    f.desc.n_chunk_sizes = 3;
    for (i = 0; i < COUNT(tolerances); i++)
        for (step = 0; step < harness_rounds(2, 1); step++) {
            double last = (step + i) % 2 ? 1 : 0.4, most;
            cf_tuning *tuning;
            const cf_tune_candidate *w, *best = NULL;
            int64_t least = INT64_MAX;
            f.desc.tolerance = tolerances[i];
            f.desc.limit_bytes = (int64_t)(last * (double)((int64_t)300 << 20));
            tuning = tune(&f);
            REQUIRE(tuning != NULL && tuning->winner >= 0);
            w = &tuning->candidates[tuning->winner];
            most = tuning->candidates[tuning->ranking[0]].seconds * tolerances[i];
            for (j = 0; j < tuning->n_ranked; j++) {
                const cf_tune_candidate *c = &tuning->candidates[tuning->ranking[j]];
                if (c->behind <= most && c->bytes < least) least = c->bytes;
            }
            for (j = 0; j < tuning->n_ranked; j++) {
                const cf_tune_candidate *c = &tuning->candidates[tuning->ranking[j]];
                if (c->behind > most) continue;
                if ((double)(c->bytes - least) > 0.05 * (double)f.desc.limit_bytes) continue;
                beaten += is_beaten(tuning, c);
                if (is_beaten(tuning, c)) continue;
                if (best == NULL || is_simpler(c, best)) best = c;
            }
            CHECK(best == w);
            CHECK(!is_beaten(tuning, w));
            moved += tuning->winner != tuning->ranking[0];
            cf_tuning_free(tuning);
        }
    CHECK(moved > 0 && beaten > 0);
}

/* Nine per cent of a GPU stay free, unless another reserve or a number of bytes is given. */
TEST(a_reserve_stays_free) {
    fixture f;
    int64_t i;
    const struct {
        int64_t reserve, limit, wanted;
    } cases[] = {{0, 0, 91}, {-1, 0, 100}, {20, 0, 80}, {20, 55 << 20, 55}};
    fixture_fill(&f, 4);
    f.gpu.memory = 100 << 20;
    f.desc.n_chunk_sizes = f.desc.n_ks = f.desc.n_kinds = 1;
    for (i = 0; i < COUNT(cases); i++) {
        cf_tuning *tuning;
        f.desc.reserve = cases[i].reserve;
        f.desc.limit_bytes = cases[i].limit;
        tuning = tune(&f);
        REQUIRE(tuning != NULL);
        CHECK_INT(tuning->limit_bytes, cases[i].wanted << 20);
        cf_tuning_free(tuning);
    }
}

/* A context is a promise of memory: every exact candidate fits with a sequence this long, as if the list had one. But
   times are the list's. */
TEST(a_context_is_a_promise_of_memory) {
    fixture f;
    cf_tuning *plain, *promised, *longer;
    int64_t i, checked = 0;
    fixture_fill(&f, 4);
    f.desc.n_exact = CF_MAX_CANDIDATES;
    f.desc.n_kinds = 2;
    f.desc.no_stream = 1;
    plain = tune(&f);
    f.desc.context = 40000;
    promised = tune(&f);
    REQUIRE(plain != NULL && promised != NULL);
    CHECK_INT(promised->n_candidates, plain->n_candidates);
    for (i = 0; i < plain->n_candidates; i++) {
        const cf_tune_candidate *a = &plain->candidates[i], *b = &promised->candidates[i];
        if (a->status != CF_TUNE_OK || b->status != CF_TUNE_OK) continue;
        CHECK(same(a->seconds, b->seconds));
        CHECK(b->bytes > a->bytes);
        CHECK_INT(b->peak_batch, f.desc.n_batches);
        checked++;
    }
    CHECK(checked > 5);
    f.lengths[37] = 40000; /* if the long sequence was drawn, only memory is compared */
    f.desc.context = 0;
    longer = tune(&f);
    REQUIRE(longer != NULL);
    for (i = 0; i < plain->n_candidates; i++)
        if (longer->candidates[i].status == CF_TUNE_OK && promised->candidates[i].status == CF_TUNE_OK)
            CHECK(longer->candidates[i].bytes >= promised->candidates[i].bytes);
    f.desc.context = -1;
    CHECK_INT(cf_tune(f.lengths, COUNT(f.lengths), &f.desc, &longer, NULL), CF_ERROR_ARGUMENT);
    cf_tuning_free(longer);
    cf_tuning_free(promised);
    cf_tuning_free(plain);
}

/* ---- statistics ---- */

TEST(intervals) {
    static const struct {
        int64_t n_batches;
        double t;
    } tabled[] = {{2, 12.706}, {4, 3.182}, {6, 2.571}, {31, 2.042}, {41, 2.021}, {101, 1.984}};
    int64_t i, b, c;
    for (i = 0; i < COUNT(tabled); i += harness_rounds(1, 2)) {
        int64_t n = tabled[i].n_batches;
        cf_tuning *tuning;
        fixture f;
        fixture_fill(&f, 8);
        f.desc.n_batches = n;
        f.desc.batch = 8;
        f.desc.n_chunk_sizes = f.desc.n_ks = 2; /* the statistics cover all candidates */
        tuning = tune(&f);
        REQUIRE(tuning != NULL);
        for (c = 0; c < tuning->n_ranked; c++) {
            const cf_tune_candidate *x = &tuning->candidates[tuning->ranking[c]];
            const double *own = &tuning->seconds[tuning->ranking[c] * n], *best = &tuning->seconds[tuning->winner * n];
            double mean = 0, off = 0, squares = 0, off_squares = 0, wanted[4], got[4];
            for (b = 0; b < n; b++) {
                mean += own[b] / (double)n;
                off += (own[b] - best[b]) / (double)n;
            }
            for (b = 0; b < n; b++) {
                squares += pow(own[b] - mean, 2);
                off_squares += pow(own[b] - best[b] - off, 2);
            }
            wanted[0] = mean;
            wanted[1] = tabled[i].t * sqrt(squares / (double)(n - 1) / (double)n);
            wanted[2] = off;
            wanted[3] = tabled[i].t * sqrt(off_squares / (double)(n - 1) / (double)n);
            got[0] = x->seconds;
            got[1] = x->confidence;
            got[2] = x->behind;
            got[3] = x->behind_confidence;
            CHECK_NEAR(harness_compare(got, 4, wanted, 4, 1e-3, 1e-12));
        }
        cf_tuning_free(tuning);
    }
}

/* ---- sameness ---- */

static void check_same(const cf_tuning *a, const cf_tuning *b) {
    int64_t i;
    REQUIRE(a != NULL && b != NULL);
    CHECK_INT(a->winner, b->winner);
    REQUIRE(CHECK_INT(a->n_candidates, b->n_candidates) && CHECK_INT(a->n_ranked, b->n_ranked));
    CHECK(memcmp(a->seconds, b->seconds, (size_t)(a->n_candidates * a->n_batches) * sizeof(double)) == 0);
    CHECK(memcmp(a->ranking, b->ranking, (size_t)a->n_ranked * sizeof(int64_t)) == 0);
    for (i = 0; i < a->n_candidates; i++) {
        CHECK_INT(a->candidates[i].status, b->candidates[i].status);
        CHECK_INT(a->candidates[i].bytes, b->candidates[i].bytes);
    }
}

TEST(same_seed_same_answer) {
    fixture f;
    cf_tuning *a, *b, *c;
    fixture_fill(&f, 6);
    a = tune(&f);
    b = tune(&f);
    check_same(a, b);
    f.desc.seed++;
    c = tune(&f);
    REQUIRE(a != NULL && c != NULL);
    CHECK(memcmp(a->batch_tokens, c->batch_tokens, (size_t)a->n_batches * sizeof(int64_t)) != 0);
    cf_tuning_free(a);
    cf_tuning_free(b);
    cf_tuning_free(c);
}

/* The required number of exact candidates changes neither the winner nor any time. */
TEST(pruning_changes_nothing) {
    fixture f;
    cf_tuning *all, *few;
    int64_t i;
    fixture_fill(&f, 12);
    f.desc.n_exact = CF_MAX_CANDIDATES;
    all = tune(&f);
    f.desc.n_exact = 1;
    few = tune(&f);
    REQUIRE(all != NULL && few != NULL);
    CHECK_INT(all->winner, few->winner);
    CHECK(few->n_simulated < all->n_simulated);
    for (i = 0; i < few->n_candidates; i++)
        if (few->candidates[i].status == CF_TUNE_OK)
            CHECK(same(few->candidates[i].seconds, all->candidates[i].seconds));
    cf_tuning_free(all);
    cf_tuning_free(few);
}

TEST(whole_list_as_a_batch) {
    fixture f;
    cf_tuning *tuning;
    fixture_fill(&f, 2);
    f.desc.batch = COUNT(f.lengths);
    f.desc.n_batches = 1;
    tuning = tune(&f);
    REQUIRE(tuning != NULL && tuning->winner >= 0);
    CHECK(same(tuning->candidates[tuning->winner].confidence, 0));
    cf_tuning_free(tuning);
    f.desc.batch = 3 * COUNT(f.lengths) + 7; /* the list goes round */
    tuning = tune(&f);
    REQUIRE(tuning != NULL && tuning->winner >= 0);
    cf_tuning_free(tuning);
}

/* If each batch is the whole list in another order, one stage takes equally long apart from rounding. That is no
   uncertainty, and none is shown. */
TEST(rounding_is_no_uncertainty) {
    fixture f;
    cf_tuning *tuning;
    int64_t i, b;
    int rounded = 0;
    fixture_fill(&f, 2);
    f.desc.parallel.pp = 1;
    f.desc.batch = COUNT(f.lengths);
    f.desc.n_batches = 5;
    f.desc.n_exact = CF_MAX_CANDIDATES;
    f.desc.n_kinds = 1;
    tuning = tune(&f);
    REQUIRE(tuning != NULL && tuning->winner >= 0);
    for (i = 0; i < tuning->n_candidates; i++) {
        const double *seconds = &tuning->seconds[i * tuning->n_batches];
        if (tuning->candidates[i].status != CF_TUNE_OK) continue;
        for (b = 1; b < tuning->n_batches; b++) {
            rounded += !same(seconds[b], seconds[0]);
            CHECK(fabs(seconds[b] - seconds[0]) <= 1e-12 * seconds[0]);
        }
        CHECK(same(tuning->candidates[i].confidence, 0) && same(tuning->candidates[i].behind_confidence, 0));
    }
    CHECK(rounded > 0);
    cf_tuning_free(tuning);
}

TEST(sequences_without_tokens) {
    fixture f;
    cf_tuning *tuning;
    fixture_fill(&f, 2);
    memset(f.lengths, 0, sizeof f.lengths);
    tuning = tune(&f);
    REQUIRE(tuning != NULL);
    CHECK(tuning->winner >= 0);
    cf_tuning_free(tuning);
}

/* ---- progress ---- */

typedef struct watcher {
    int64_t calls, stop_at, all, left; /* all: the sum of the work reported */
    /* at the first call at or above `third`: the work so far, and the work announced as left */
    int64_t third, done, said;
} watcher;

static int watch(void *user, const cf_tune_progress *progress) {
    watcher *w = (watcher *)user;
    w->calls++;
    CHECK(progress->done >= 0 && progress->left >= 0);
    w->all += progress->done;
    w->left = progress->left;
    if (w->done == 0 && w->all >= w->third) {
        w->done = w->all;
        w->said = w->left;
    }
    return w->calls == w->stop_at;
}

/* Progress counts work. At the end all of it is reported and nothing is left. The work announced as left after a third
   is within 1.5 x of the true rest if every candidate is simulated, and within 2 x in a race. */
TEST(progress_ends_with_the_work) {
    int64_t seed, race, all = 0;
    for (seed = 1; seed <= 3; seed++)
        for (race = 0; race < 2; race++) {
            fixture f;
            watcher w[2];
            double left;
            int run;
            fixture_fill(&f, (uint64_t)seed);
            f.desc.n_exact = race ? 0 : CF_MAX_CANDIDATES;
            f.desc.progress = watch;
            memset(w, 0, sizeof w);
            for (run = 0; run < 2; run++) {
                cf_tuning *tuning;
                w[run].third = (all + 2) / 3;
                f.desc.user = &w[run];
                tuning = tune(&f);
                REQUIRE(tuning != NULL);
                CHECK(w[run].calls > 0);
                CHECK_INT(w[run].left, 0);
                all = w[run].all;
                cf_tuning_free(tuning);
            }
            left = (double)(all - w[1].done);
            CHECK_INT(w[1].all, w[0].all);
            CHECK((double)w[1].said < (race ? 2 : 1.5) * left && (race ? 2 : 1.5) * (double)w[1].said > left);
            harness_report("after a third %lld is said to be left, and %.0f is", (long long)w[1].said, left);
        }
}

TEST(interruption) {
    fixture f;
    watcher w;
    cf_tuning *full, *part;
    int64_t calls, stop, i;
    fixture_fill(&f, 13);
    f.desc.n_ks = 2;
    memset(&w, 0, sizeof w);
    f.desc.progress = watch;
    f.desc.user = &w;
    full = tune(&f);
    REQUIRE(full != NULL);
    CHECK(w.calls > 0);
    CHECK_INT(w.left, 0);
    CHECK(!full->interrupted);
    calls = w.calls;
    for (stop = 1; stop <= calls; stop += 1 + calls / 23) {
        memset(&w, 0, sizeof w);
            w.stop_at = stop;
        part = tune(&f);
        REQUIRE(part != NULL);
        CHECK_INT(w.calls, stop); /* never called again */
        CHECK_INT(part->interrupted, 1);
        for (i = 0; i < part->n_candidates; i++)
            if (part->candidates[i].status == CF_TUNE_OK && full->candidates[i].status == CF_TUNE_OK)
                CHECK(same(part->candidates[i].seconds, full->candidates[i].seconds));
        REQUIRE(part->winner >= 0); /* a winner exists before the first call asks for one */
        CHECK_INT(part->candidates[part->winner].status, CF_TUNE_OK);
        CHECK_INT(part->ranking[0], part->winner);
        cf_tuning_free(part);
    }
    cf_tuning_free(full);
}

/* ---- splits ---- */

/* Without a pipeline but with ranks, ZeRO is tried from 1 to 3, otherwise only 1. A given level stays. */
TEST(splits_of_gpus) {
    static const int64_t given[] = {-1, 1, 2, 3};
    fixture f;
    cf_tuning *tuning;
    int64_t tp, pp, zero, i, n = 0;
    fixture_fill(&f, 1);
    f.desc.parallel.pp = 0;
    f.desc.n_gpus = 8;
    f.desc.n_chunk_sizes = f.desc.n_ks = f.desc.n_kinds = 1;
    tuning = tune(&f);
    REQUIRE(tuning != NULL);
    for (tp = 1; tp <= 8; tp++)
        for (pp = 1; pp <= 8; pp++) {
            cf_parallel p = {0};
            if (8 % (tp * pp) != 0) continue;
            p.tp = tp;
            p.pp = pp;
            p.dp = 8 / tp / pp;
            if (cf_parallel_validate(&small, &p, NULL) != CF_OK) continue;
            for (zero = 1; zero <= (pp == 1 && p.dp > 1 ? 3 : 1); zero++) {
                REQUIRE(n < tuning->n_splits);
                CHECK_INT(tuning->splits[n].tp, tp);
                CHECK_INT(tuning->splits[n].pp, pp);
                CHECK_INT(tuning->splits[n].dp, p.dp);
                CHECK_INT(tuning->splits[n].zero, zero);
                n++;
            }
        }
    CHECK_INT(tuning->n_splits, n);
    CHECK(n >= 6);
    cf_tuning_free(tuning);
    f.desc.parallel.tp = 2;
    for (i = 0; i < COUNT(given); i++) {
        f.desc.parallel.zero = given[i];
        tuning = tune(&f);
        REQUIRE(tuning != NULL);
        CHECK_INT(tuning->n_splits, 3);
        for (n = 0; n < tuning->n_splits; n++) CHECK_INT(tuning->splits[n].zero, given[i] > 0 ? given[i] : 0);
        cf_tuning_free(tuning);
    }
    f.desc.parallel.zero = 0; /* parameters offloaded from the GPU need ZeRO 3, with a pipeline as well */
    f.desc.memory.offload = CF_OFFLOAD_PARAMETERS;
    tuning = tune(&f);
    REQUIRE(tuning != NULL);
    CHECK_INT(tuning->n_splits, 3);
    for (n = 0; n < tuning->n_splits; n++) CHECK_INT(tuning->splits[n].zero, 3);
    cf_tuning_free(tuning);
}

/* Two sequences a batch may run on eight ranks if four ranks share each, and with groups of two on four. */
TEST(more_ranks_than_sequences_where_groups_share_them) {
    fixture f;
    cf_tuning *tuning;
    int64_t i, most = 0, n_over_stages = 0;
    fixture_fill(&f, 1);
    f.desc.parallel.pp = 0;
    f.desc.n_gpus = 16;
    f.desc.batch = 2;
    f.desc.pack.max_cp = 4;
    f.desc.n_chunk_sizes = f.desc.n_ks = f.desc.n_kinds = 1;
    tuning = tune(&f);
    REQUIRE(tuning != NULL);
    for (i = 0; i < tuning->n_splits; i++) {
        const cf_parallel *split = &tuning->splits[i];
        const int64_t cp = tuning->max_cps[i] > 1 ? tuning->max_cps[i] : 1;
        CHECK(split->dp <= 2 * cp);
        n_over_stages += split->pp > 1 && cp > 1;
        most = split->dp > most ? split->dp : most;
    }
    CHECK_INT(most, 8);
    CHECK(n_over_stages > 2);
    cf_tuning_free(tuning);
}

/* Measured costs replace a GPU's. */
TEST(measured_costs) {
    static const int64_t one_size[] = {1000000}, one_k[] = {1};
    cf_timing timing;
    fixture f;
    cf_tuning *tuning;
    int64_t i;
    fixture_fill(&f, 1);
    memset(&timing, 0, sizeof timing);
    timing.all.forward.per_token = 1;
    timing.all.backward.per_token = 2;
    f.desc.gpu = NULL;
    f.desc.timing = &timing;
    f.desc.step_seconds = 5;
    f.desc.parallel.pp = 1;
    f.desc.chunk_sizes = one_size;
    f.desc.ks = one_k;
    f.desc.n_chunk_sizes = f.desc.n_ks = 1;
    tuning = tune(&f);
    REQUIRE(tuning != NULL && tuning->winner >= 0);
    for (i = 0; i < f.desc.n_batches; i++)
        CHECK(same(tuning->seconds[tuning->winner * f.desc.n_batches + i], 3 * (double)tuning->batch_tokens[i] + 5));
    cf_tuning_free(tuning);
}

/* ---- without a model ---- */

/* The fixture's model as the bytes and seconds that a caller without a cf_model would have measured. */
typedef struct measured {
    cf_stage_cost stages[MOST_STAGES];
    cf_stage_bytes bytes[MOST_STAGES];
    cf_timing timing;
    double step;
} measured;

static int measure(const fixture *f, measured *m) {
    cf_cost_desc cost = {0};
    cf_memory_desc memory = f->desc.memory;
    cf_memory_load none[MOST_STAGES] = {0};
    cf_memory_report reports[MOST_STAGES];
    int64_t pp = f->desc.parallel.pp, s;
    memset(m, 0, sizeof *m);
    cost.model = memory.model = f->desc.model;
    cost.gpu = f->desc.gpu;
    cost.parallel = memory.parallel = f->desc.parallel;
    if (cf_cost_estimate(&cost, m->stages, pp, &m->timing, &m->step, NULL) != CF_OK ||
        cf_memory_estimate(&memory, none, pp, reports, pp, NULL) != CF_OK)
        return 0;
    for (s = 0; s < pp; s++) {
        cf_token_bytes bytes;
        if (cf_memory_token_bytes(&memory, s, &bytes, NULL) != CF_OK) return 0;
        m->bytes[s].held.activations = bytes.activations;
        m->bytes[s].held.state = bytes.state;
        m->bytes[s].held.state_gradient = bytes.state_gradient;
        m->bytes[s].held.boundary = bytes.boundary;
        m->bytes[s].per_token_pass = (bytes.logits > bytes.working ? bytes.logits : bytes.working) + bytes.buffers;
        m->bytes[s].fixed = reports[s].total;
    }
    return 1;
}

/* A search without a model gives the same result as one with a model of the same bytes and seconds, at limits from
   ample to none. */
TEST(own_bytes_are_as_good_as_a_model) {
    int64_t step, i, limited = 0, infeasible = 0;
    for (step = 0; step < 6; step += harness_rounds(1, 4)) {
        fixture f;
        measured m;
        cf_tuning *with, *without;
        fixture_fill(&f, 3);
        f.desc.memory.fragmentation = -1;
        f.desc.n_exact = CF_MAX_CANDIDATES;
        f.desc.n_ks = f.desc.n_batches = 2;
        f.desc.limit_bytes = (64 << 20) + (step << 24);
        REQUIRE(measure(&f, &m));
        f.desc.timing = &m.timing;
        f.desc.step_seconds = m.step;
        f.desc.gpu = NULL;
        with = tune(&f);
        f.desc.model = NULL;
        f.desc.bytes = m.bytes;
        memset(&f.desc.memory, 0xff, sizeof f.desc.memory); /* not looked at */
        without = tune(&f);
        REQUIRE(with != NULL && without != NULL);
        check_same(with, without);
        for (i = 0; i < with->n_candidates; i++) {
            const cf_tune_candidate *a = &with->candidates[i], *b = &without->candidates[i];
            const cf_memory_report *r = &b->memory;
            CHECK_INT(b->stage, a->stage);
            CHECK_INT(b->limited, a->limited);
            CHECK_INT(r->host, a->memory.host);
            CHECK_INT(r->activations, a->memory.activations);
            CHECK_INT(r->state + r->state_gradient, a->memory.state + a->memory.state_gradient);
            CHECK_INT(r->activations + r->state + r->state_gradient + r->inputs + r->working + r->runtime, r->total);
            limited += b->limited && b->status == CF_TUNE_OK;
            infeasible += b->status == CF_TUNE_INFEASIBLE;
        }
        cf_tuning_free(with);
        cf_tuning_free(without);
    }
    CHECK(limited > 0 && infeasible > 0);
}

/* Stages that keep no state, several virtual stages on each, and a limit by hand: two chunks of 100 tokens of 10 bytes,
   7 bytes a token for the current one, and twice 1,000 bytes that are always there. */
TEST(own_bytes_by_hand) {
    static const int64_t one_size[] = {100}, one_k[] = {1};
    static const cf_schedule_kind one_kind[] = {CF_SCHEDULE_INTERLEAVED};
    cf_stage_bytes bytes[2];
    cf_timing timing;
    fixture f;
    cf_tuning *tuning;
    int64_t i;
    fixture_fill(&f, 1);
    for (i = 0; i < COUNT(f.lengths); i++) f.lengths[i] = 100;
    memset(bytes, 0, sizeof bytes);
    memset(&timing, 0, sizeof timing);
    bytes[0].held.activations = bytes[1].held.activations = 10;
    bytes[0].per_token_pass = 3;
    bytes[1].per_token_pass = 7;
    bytes[0].fixed = bytes[1].fixed = 1000;
    timing.all.forward.per_token = 1;
    f.desc.model = NULL;
    f.desc.gpu = NULL;
    f.desc.timing = &timing;
    f.desc.bytes = bytes;
    f.desc.parallel.pp = 1;
    f.desc.parallel.n_virtual = 2;
    f.desc.chunk_sizes = one_size;
    f.desc.ks = one_k;
    f.desc.kinds = one_kind;
    f.desc.n_chunk_sizes = f.desc.n_ks = f.desc.n_kinds = 1;
    f.desc.batch = 1;
    f.desc.limit_bytes = 2 * 1000 + 2 * 1000 + 700;
    tuning = tune(&f);
    REQUIRE(tuning != NULL && tuning->winner >= 0);
    CHECK_INT(tuning->candidates[tuning->winner].bytes, 4700);
    CHECK_INT(tuning->candidates[tuning->winner].memory.runtime, 2000);
    CHECK_INT(tuning->candidates[tuning->winner].memory.working, 700);
    CHECK(same(tuning->candidates[tuning->winner].seconds, 600)); /* forward 1, backward 2, on two virtual stages */
    cf_tuning_free(tuning);
    f.desc.limit_bytes--;
    tuning = tune(&f);
    REQUIRE(tuning != NULL);
    CHECK_INT(tuning->winner, -1);
    CHECK_INT(tuning->smallest_limit, 4700);
    cf_tuning_free(tuning);
}

/* ---- bad input ---- */

static void refuse(fixture *f, cf_result code, const char *field, int64_t wanted) {
    cf_tuning *tuning = (cf_tuning *)(void *)f;
    cf_error error = {0};
    harness_note("%s", field);
    CHECK_INT(cf_tune(f->lengths, COUNT(f->lengths), &f->desc, &tuning, &error), code);
    CHECK(tuning == (cf_tuning *)(void *)f);
    CHECK_STR(error.field, field);
    CHECK_INT(error.code, code);
    CHECK_INT(error.wanted, wanted);
    harness_note("%s", "");
    fixture_fill(f, 1);
}

TEST(bad_descriptions) {
    static const int64_t falling[] = {256, 128}, zero[] = {0}, huge[] = {(int64_t)1 << 40};
    static const cf_schedule_kind twice[] = {CF_SCHEDULE_BEST, CF_SCHEDULE_BEST}, wrong[] = {(cf_schedule_kind)99};
    static const cf_replay replays[] = {CF_REPLAY_LOCAL, CF_REPLAY_LOCAL};
    static const cf_timing unit = {.latency = 0};
    fixture f;
    fixture_fill(&f, 1);
    f.desc.model = NULL;
    refuse(&f, CF_ERROR_ARGUMENT, "model", 0);
    f.desc.gpu = NULL;
    refuse(&f, CF_ERROR_ARGUMENT, "gpu", 0);
    f.desc.parallel.tp = 3;
    refuse(&f, CF_ERROR_ARGUMENT, "parallel.tp", 2);
    f.desc.parallel.pp = 9;
    refuse(&f, CF_ERROR_ARGUMENT, "parallel.pp", 8);
    f.desc.chunk_sizes = falling;
    f.desc.n_chunk_sizes = 2;
    refuse(&f, CF_ERROR_ARGUMENT, "chunk_sizes", 257);
    f.desc.chunk_sizes = zero;
    f.desc.n_chunk_sizes = 1;
    refuse(&f, CF_ERROR_ARGUMENT, "chunk_sizes", 1);
    f.desc.chunk_sizes = huge;
    f.desc.n_chunk_sizes = 1;
    refuse(&f, CF_ERROR_LIMIT, "chunk_sizes", CF_MAX_CHUNK_SIZE);
    f.desc.n_chunk_sizes = 0;
    refuse(&f, CF_ERROR_ARGUMENT, "n_chunk_sizes", 1);
    f.desc.ks = zero;
    f.desc.n_ks = 1;
    refuse(&f, CF_ERROR_ARGUMENT, "ks", 1);
    f.desc.kinds = twice;
    f.desc.n_kinds = 2;
    refuse(&f, CF_ERROR_ARGUMENT, "kinds", 0);
    f.desc.kinds = wrong;
    f.desc.n_kinds = 1;
    refuse(&f, CF_ERROR_ARGUMENT, "kinds", CF_SCHEDULE_BEST);
    f.desc.parallel.n_virtual = 2;
    refuse(&f, CF_ERROR_ARGUMENT, "kinds", CF_SCHEDULE_BEST);
    f.desc.replays = replays;
    f.desc.n_replays = 2;
    refuse(&f, CF_ERROR_ARGUMENT, "replays", 0);
    f.desc.replays = both;
    f.desc.n_replays = 2;
    refuse(&f, CF_ERROR_ARGUMENT, "replays", CF_REPLAY_LOCAL);
    f.desc.batch = -1;
    refuse(&f, CF_ERROR_ARGUMENT, "batch", 1);
    f.desc.n_batches = CF_MAX_TUNE_BATCHES + 1;
    refuse(&f, CF_ERROR_LIMIT, "n_batches", CF_MAX_TUNE_BATCHES);
    f.desc.n_exact = -1;
    refuse(&f, CF_ERROR_ARGUMENT, "n_exact", 0);
    f.desc.max_tries = -1;
    refuse(&f, CF_ERROR_ARGUMENT, "max_tries", 0);
    f.desc.limit_bytes = -5;
    refuse(&f, CF_ERROR_ARGUMENT, "limit_bytes", 0);
    f.desc.memory.unfused_attention = 1;
    refuse(&f, CF_ERROR_ARGUMENT, "memory.unfused_attention", 0);
    f.desc.memory.runtime_bytes = -1;
    refuse(&f, CF_ERROR_ARGUMENT, "runtime_bytes", 1);
    fixture_plant(&f, 1);
    f.desc.parallel.dp = 2;
    f.desc.parallel.zero = 3;
    refuse(&f, CF_ERROR_ARGUMENT, "parallel.zero", 0);
    fixture_plant(&f, 1);
    f.desc.pack.lockstep = 1;
    refuse(&f, CF_ERROR_ARGUMENT, "pack.lockstep", 0);
    f.desc.pack.max_cp = 2;
    f.desc.split_backward = 1;
    refuse(&f, CF_ERROR_ARGUMENT, "split_backward", 0);
    f.desc.pack.max_cp = 2;
    f.desc.kinds = &kinds[2];
    f.desc.n_kinds = 1;
    refuse(&f, CF_ERROR_ARGUMENT, "kinds", 0);
    f.desc.pack.max_cp = 2;
    f.desc.kinds = &kinds[3];
    f.desc.n_kinds = 1;
    f.desc.parallel.n_virtual = 2;
    refuse(&f, CF_ERROR_ARGUMENT, "pack.max_cp", 0);
    f.desc.n_gpus = 8; /* pp is 3 */
    refuse(&f, CF_ERROR_ARGUMENT, "n_gpus", 9);
    f.desc.n_gpus = 3;
    f.desc.timing = &unit;
    refuse(&f, CF_ERROR_ARGUMENT, "timing", 0);
    f.desc.timing = &unit;
    f.desc.step_seconds = -1;
    refuse(&f, CF_ERROR_ARGUMENT, "step_seconds", 0);
    f.desc.timing = &unit;
    f.desc.gpu = NULL;
    f.desc.limit_bytes = 0;
    refuse(&f, CF_ERROR_ARGUMENT, "limit_bytes", 0);
}

TEST(bad_bytes) {
    fixture f;
    measured m;
    cf_stage_bytes *second = &m.bytes[1];
    int i;
    for (i = 0; i < 12; i++) {
        static const struct {
            cf_result code;
            const char *field;
            int64_t wanted;
        } cases[12] = {{CF_ERROR_ARGUMENT, "bytes", 0},
                       {CF_ERROR_ARGUMENT, "timing", 0},
                       {CF_ERROR_ARGUMENT, "n_gpus", 0},
                       {CF_ERROR_ARGUMENT, "limit_bytes", 0},
                       {CF_ERROR_ARGUMENT, "parallel.pp", 1},
                       {CF_ERROR_LIMIT, "parallel.n_virtual", CF_MAX_STAGES / 3},
                       {CF_ERROR_ARGUMENT, "parallel.dp", 1},
                       {CF_ERROR_ARGUMENT, "bytes.held.activations", 1},
                       {CF_ERROR_ARGUMENT, "bytes.held.state", 0},
                       {CF_ERROR_LIMIT, "bytes.per_token_pass", CF_MAX_STAGE_BYTES},
                       {CF_ERROR_ARGUMENT, "bytes.fixed", 0},
                       {CF_ERROR_ARGUMENT, "timing.forward.per_token", 0}};
        fixture_fill(&f, 1);
        REQUIRE(measure(&f, &m));
        f.desc.timing = &m.timing;
        f.desc.bytes = m.bytes;
        if (i > 0) f.desc.model = NULL;
        if (i == 1) f.desc.timing = NULL;
        if (i == 2) f.desc.n_gpus = 3;
        if (i == 3) f.desc.gpu = NULL, f.desc.limit_bytes = 0;
        if (i == 4) f.desc.parallel.pp = -1;
        if (i == 5) f.desc.parallel.n_virtual = CF_MAX_STAGES;
        if (i == 6) f.desc.parallel.dp = -3;
        if (i == 7) second->held.activations = 0;
        if (i == 8) second->held.state = -1;
        if (i == 9) second->per_token_pass = CF_MAX_STAGE_BYTES + 1;
        if (i == 10) second->fixed = -1;
        if (i == 11) m.stages[2].forward.per_token = -1;
        refuse(&f, cases[i].code, cases[i].field, cases[i].wanted);
    }
}

TEST(bad_lengths) {
    fixture f;
    cf_tuning *tuning = NULL;
    cf_error error;
    fixture_fill(&f, 1);
    f.lengths[50] = -1;
    CHECK_INT(cf_tune(f.lengths, COUNT(f.lengths), &f.desc, &tuning, &error), CF_ERROR_ARGUMENT);
    CHECK_STR(error.field, "lengths");
    CHECK_INT(error.item, 50);
    f.lengths[50] = 400;
    fixture_plant(&f, 1);
    f.shares[0].tokens = f.shares[1].tokens = 1;
    f.shares[0].with = 1;
    f.shares[1].with = 0;
    CHECK_INT(cf_tune(f.lengths, COUNT(f.lengths), &f.desc, &tuning, &error), CF_ERROR_ARGUMENT);
    CHECK_STR(error.field, "shared_prefixes");
    f.desc.pack.shared_prefixes = NULL;
    f.lengths[50] = CF_MAX_LENGTH + 1;
    CHECK_INT(cf_tune(f.lengths, COUNT(f.lengths), &f.desc, &tuning, &error), CF_ERROR_LIMIT);
    CHECK_INT(error.wanted, CF_MAX_LENGTH);
    CHECK_INT(cf_tune(f.lengths, 0, &f.desc, &tuning, &error), CF_ERROR_ARGUMENT);
    CHECK_STR(error.field, "n");
    CHECK_INT(cf_tune(NULL, 1, &f.desc, &tuning, &error), CF_ERROR_ARGUMENT);
    CHECK_STR(error.field, "lengths");
    CHECK_INT(cf_tune(f.lengths, 1, NULL, &tuning, &error), CF_ERROR_ARGUMENT);
    CHECK_STR(error.field, "desc");
    CHECK_INT(cf_tune(f.lengths, 1, &f.desc, NULL, &error), CF_ERROR_ARGUMENT);
    CHECK_STR(error.field, "out");
    CHECK(tuning == NULL);
    CHECK_STR(cf_tune_status_name(CF_TUNE_INFEASIBLE), "infeasible");
    CHECK_STR(cf_tune_status_name(CF_TUNE_STATUS_COUNT), "?");
    cf_tuning_free(NULL);
}

/* A schedule that did not fit and was made again leaves no trace in the caller's error record. */
/* ---- the schedule that a candidate stands for ---- */

/* The seconds of a schedule of the fixture's stages, with the optimizer's step. */
static double seconds_of(const fixture *f, const cf_plan *plan, const cf_schedule *schedule, int outputs) {
    cf_stage_cost costs[8];
    cf_simulate_desc simulate = {0};
    cf_cost_desc cost = {0};
    cf_timeline *timeline = NULL;
    cf_timing timing;
    double seconds = -1;
    cost.model = f->desc.model;
    cost.gpu = f->desc.gpu;
    cost.parallel = f->desc.parallel;
    cost.chunk_size = plan->chunk_size;
    cost.outputs = outputs;
    simulate.timing = &timing;
    if (cf_cost_estimate(&cost, costs, f->desc.parallel.pp, &timing, &seconds, NULL) == CF_OK &&
        cf_simulate(plan, schedule, &simulate, &timeline, NULL) == CF_OK)
        seconds += timeline->makespan;
    cf_timeline_free(timeline);
    return seconds;
}

/* The times of the search, batch by batch, equal those of the schedules that are made for the same batches. */
static void check_choice(const fixture *f, const cf_tuning *tuning, int64_t id, int64_t batch, const int64_t *lengths) {
    const cf_tune_candidate *c = &tuning->candidates[id];
    cf_pack_desc pack = f->desc.pack;
    cf_plan *plan = NULL;
    cf_schedule *schedule = NULL;
    cf_error error;
    pack.chunk_size = c->chunk_size;
    if (pack.shared_prefixes != NULL) pack.shared_prefixes = drawn_shares[batch];
    CHECK(memcmp(&tuning->batches[batch * tuning->batch], lengths, (size_t)tuning->batch * sizeof *lengths) == 0);
    REQUIRE(cf_pack(lengths, f->desc.batch, &pack, &plan, NULL) == CF_OK);
    if (cf_tune_schedule(&f->desc, tuning, id, plan, 0, &schedule, &error) != CF_OK) {
        harness_note("%s", error.text);
        CHECK(schedule != NULL);
    } else {
        CHECK_INT(schedule->lowered, 0);
        if (batch < tuning->n_batches && c->state_window == 0)
            CHECK(same(seconds_of(f, plan, schedule, c->outputs), tuning->seconds[id * tuning->n_batches + batch]));
    }
    cf_schedule_free(schedule);
    cf_plan_free(plan);
}

/* Returns how many candidates were exact and under a limit. */
static int64_t check_choices(const fixture *f) {
    static int64_t batches[MOST_BATCHES + 1][MOST_BATCH];
    cf_tuning *tuning = tune(f);
    int64_t i, b, limited = 0;
    if (tuning == NULL) return -1;
    draw(f, batches);
    for (i = 0; i < tuning->n_candidates; i++) {
        if (tuning->candidates[i].status != CF_TUNE_OK) continue;
        limited += tuning->candidates[i].limited;
        for (b = 0; b <= tuning->n_batches; b++) check_choice(f, tuning, i, b, batches[b]);
    }
    CHECK(tuning->n_ranked > 3);
    cf_tuning_free(tuning);
    return limited;
}

TEST(schedule_of_a_candidate) {
    fixture f;
    cf_tuning *tuning;
    fixture_fill(&f, 3);
    CHECK_INT(check_choices(&f), 0);
    tuning = tune(&f);
    REQUIRE(tuning != NULL);
    f.desc.limit_bytes = tuning->candidates[tuning->winner].bytes / 10 * 9;
    cf_tuning_free(tuning);
    CHECK(check_choices(&f) > 0);
}

/* ---- ranks in step ---- */

enum { MOST_RANKS = 4 };

/* Returns the seconds of a batch whose ranks have one stage and run in lockstep: the slowest rank's seconds in each
   pass, added up. */
static double seconds_in_step(const cf_plan *plan, cf_schedule *const *schedules, const cf_stage_cost *cost) {
    const cf_pass_cost *const of[] = {&cost->forward, &cost->replay, NULL, &cost->input, &cost->weight};
    double sum = 0;
    int64_t i, rank;
    for (i = 0; i < schedules[0]->n_actions; i++) {
        double most = 0;
        for (rank = 0; rank < plan->n_ranks; rank++) {
            const cf_action *a = &schedules[rank]->actions[i];
            const cf_chunk *c = &plan->chunks[a->chunk];
            double own = a->pass == CF_B ? cf_cost_seconds(of[CF_I], c->rows, c->pairs) +
                                               cf_cost_seconds(of[CF_W], c->rows, c->pairs)
                                         : cf_cost_seconds(of[a->pass], c->rows, c->pairs);
            if (c->n_slices > 0 && own > most) most = own;
        }
        sum += most;
    }
    return sum;
}

/* Packs a batch for a candidate in lockstep, makes the schedules of all ranks, and returns the batch's seconds. */
static double batch_in_step(const fixture *f, const cf_tuning *tuning, int64_t id, const int64_t *batch) {
    const cf_tune_candidate *c = &tuning->candidates[id];
    cf_schedule *schedules[MOST_RANKS] = {NULL};
    cf_pack_desc pack = f->desc.pack;
    cf_cost_desc cost = {0};
    cf_stage_cost stage;
    cf_timing timing;
    cf_plan *plan = NULL;
    double step = 0, seconds = 0;
    int64_t rank;
    pack.chunk_size = cost.chunk_size = c->chunk_size;
    pack.n_ranks = f->desc.parallel.dp;
    pack.lockstep = 1;
    cost.model = f->desc.model;
    cost.gpu = f->desc.gpu;
    cost.parallel = f->desc.parallel;
    cost.outputs = c->outputs;
    if (!CHECK_INT(cf_cost_estimate(&cost, &stage, 1, &timing, &step, NULL), CF_OK)) return 0;
    if (!CHECK_INT(cf_pack(batch, f->desc.batch, &pack, &plan, NULL), CF_OK)) return 0;
    for (rank = 0; rank < plan->n_ranks; rank++)
        CHECK_INT(cf_tune_schedule(&f->desc, tuning, id, plan, rank, &schedules[rank], NULL), CF_OK);
    if (CHECK_INT(cf_lockstep_validate(plan, (const cf_schedule *const *)schedules, NULL, NULL, NULL), CF_OK))
        seconds = seconds_in_step(plan, schedules, &stage) + step;
    for (rank = 0; rank < plan->n_ranks; rank++) cf_schedule_free(schedules[rank]);
    cf_plan_free(plan);
    return seconds;
}

/* With ZeRO 3, or if the packing requires it, ranks meet in every pass and are timed in lockstep. Each pass takes as
   long as on its slowest rank, and a batch takes the sum. The search overestimates slightly, because it times one
   column for all ranks, with a chunk's rows and the pairs of the most expensive chunk. Otherwise ranks are timed one by
   one. */
TEST(ranks_run_in_step_where_they_meet) {
    static int64_t batches[MOST_BATCHES + 1][MOST_BATCH];
    double worst = 0, least = 1, free_seconds, step_seconds;
    cf_tuning *tuning, *same_way;
    fixture f;
    int64_t i, b, n = 0;
    fixture_fill(&f, 11);
    memset(&f.desc.parallel, 0, sizeof f.desc.parallel);
    f.desc.parallel.dp = MOST_RANKS;
    f.desc.parallel.recompute = CF_RECOMPUTE_NONE;
    f.desc.parallel.zero = 1;
    f.desc.no_stream = 1;
    tuning = tune(&f);
    REQUIRE(tuning != NULL && tuning->winner >= 0);
    for (i = 0; i < tuning->n_candidates; i++) CHECK_INT(tuning->candidates[i].in_step, 0);
    free_seconds = tuning->candidates[tuning->ranking[0]].seconds;
    cf_tuning_free(tuning);
    f.desc.pack.lockstep = 1;
    same_way = tune(&f);
    REQUIRE(same_way != NULL && same_way->winner >= 0 && same_way->candidates[0].in_step == 1);
    step_seconds = same_way->candidates[same_way->ranking[0]].seconds;
    cf_tuning_free(same_way);
    f.desc.pack.lockstep = 0;
    f.desc.parallel.zero = 3;
    tuning = tune(&f);
    REQUIRE(tuning != NULL && tuning->winner >= 0);
    draw(&f, batches);
    for (i = 0; i < tuning->n_candidates; i++) {
        CHECK_INT(tuning->candidates[i].in_step, 1);
        for (b = 0; b < tuning->n_batches && tuning->candidates[i].status == CF_TUNE_OK; b++, n++) {
            double ratio = tuning->seconds[i * tuning->n_batches + b] / batch_in_step(&f, tuning, i, batches[b]);
            if (ratio > worst) worst = ratio;
            if (ratio < least) least = ratio;
        }
    }
    harness_report("%d batches in step: columns take %.4f to %.4f of the slowest ranks' passes; in step / free %.3f", (int)n,
                   least, worst, step_seconds / free_seconds);
    CHECK(n > 10 && least > 0.98 && worst < 1.02);
    CHECK(step_seconds >= free_seconds);
    cf_tuning_free(tuning);
    f.desc.parallel.dp = 1;
    tuning = tune(&f);
    REQUIRE(tuning != NULL);
    CHECK_INT(tuning->candidates[0].in_step, 0);
    cf_tuning_free(tuning);
}

/* ---- the limits that make a schedule fit ---- */

/* Makes a candidate's schedule by public functions only: without limits and, if that does not fit, under those of
   cf_memory_limits. Returns NULL if none fits. */
static cf_schedule *make_fitting(const fixture *f, const cf_tune_candidate *c, const cf_plan *plan, int64_t limit) {
    int64_t by_stage[8];
    cf_memory_desc memory = f->desc.memory;
    cf_memory_report reports[8];
    cf_stage_cost costs[8];
    cf_cost_desc cost = {0};
    cf_timing timing;
    int way;
    memory.model = cost.model = f->desc.model;
    memory.parallel = cost.parallel = f->desc.parallel;
    memory.outputs = c->outputs;
    cost.outputs = c->outputs;
    cost.gpu = f->desc.gpu;
    cost.chunk_size = plan->chunk_size;
    if (cf_cost_estimate(&cost, costs, f->desc.parallel.pp, &timing, NULL, NULL) != CF_OK) return NULL;
    for (way = 0; way < 2; way++) {
        cf_schedule_desc desc = {0};
        cf_schedule *schedule = NULL;
        int64_t s, most = 0;
        desc.kind = c->kind;
        desc.shape.replay = c->replay;
        desc.shape.outputs = c->outputs > 0;
        desc.shape.n_stages = f->desc.parallel.pp;
        desc.shape.k = c->k;
        desc.timing = &timing;
        desc.max_tries = f->desc.max_tries;
        desc = cf_schedule_defaults(&desc);
        desc.limits.chunks = CF_NO_LIMIT;
        if (way > 0)
            CHECK_INT(cf_memory_limits(&memory, plan, &desc.shape, limit, by_stage, &desc.limits, NULL, NULL), CF_OK);
        if (cf_schedule_make(plan, &desc, &schedule, NULL) != CF_OK) continue;
        CHECK_INT(cf_schedule_memory(&memory, plan, schedule, reports, f->desc.parallel.pp, NULL, NULL), CF_OK);
        for (s = 0; s < f->desc.parallel.pp; s++)
            if (reports[s].total > most) most = reports[s].total;
        if (most <= limit) return schedule;
        cf_schedule_free(schedule);
    }
    return NULL;
}

/* Public functions only make the schedule of cf_tune_schedule within a limit, action for action. */
TEST(limits_of_memory_are_those_of_the_search) {
    static int64_t batches[MOST_BATCHES + 1][MOST_BATCH];
    fixture f;
    cf_tuning *tuning;
    int64_t i, b, limited = 0;
    fixture_fill(&f, 3);
    tuning = tune(&f);
    REQUIRE(tuning != NULL);
    f.desc.limit_bytes = tuning->candidates[tuning->winner].bytes / 10 * 9;
    cf_tuning_free(tuning);
    tuning = tune(&f);
    REQUIRE(tuning != NULL);
    draw(&f, batches);
    for (i = 0; i < tuning->n_candidates; i++)
        for (b = 0; b <= tuning->n_batches && tuning->candidates[i].status == CF_TUNE_OK; b++) {
            const cf_tune_candidate *c = &tuning->candidates[i];
            cf_pack_desc pack = f.desc.pack;
            cf_plan *plan = NULL;
            cf_schedule *ours, *theirs = NULL;
            if (c->state_window > 0) continue;
            pack.chunk_size = c->chunk_size;
            REQUIRE(cf_pack(batches[b], f.desc.batch, &pack, &plan, NULL) == CF_OK);
            CHECK_INT(cf_tune_schedule(&f.desc, tuning, i, plan, 0, &theirs, NULL), CF_OK);
            ours = make_fitting(&f, c, plan, f.desc.limit_bytes);
            CHECK(ours != NULL && ours->n_actions == theirs->n_actions &&
                  memcmp(ours->actions, theirs->actions, (size_t)ours->n_actions * sizeof *ours->actions) == 0);
            limited += theirs->limits.bytes_by_stage != NULL;
            cf_schedule_free(ours);
            cf_schedule_free(theirs);
            cf_plan_free(plan);
        }
    CHECK(limited > 0);
    cf_tuning_free(tuning);
}

TEST(limits_of_memory_refuse) {
    const int64_t lengths[] = {9000, 700};
    cf_plan *plan = naive_pack(lengths, 2, 2048);
    int64_t by_stage[2] = {-7, -7};
    cf_memory_desc memory = {0};
    cf_shape shape = {0};
    cf_limits limits = {0};
    cf_error error;
    REQUIRE(plan != NULL);
    memory.model = &small;
    shape.n_stages = 2;
    shape.n_virtual = 1;
#define REFUSED(call, name)                          \
    do {                                             \
        memset(&error, 0, sizeof error);             \
        CHECK_INT(call, CF_ERROR_ARGUMENT);          \
        CHECK_STR(error.field, name);                \
        CHECK(by_stage[0] == -7 && limits.bytes_by_stage == NULL); \
    } while (0)
    REFUSED(cf_memory_limits(&memory, plan, &shape, 1, by_stage, &limits, NULL, &error), "parallel.pp");
    memory.parallel.pp = 2;
    REFUSED(cf_memory_limits(NULL, plan, &shape, 1, by_stage, &limits, NULL, &error), "desc");
    REFUSED(cf_memory_limits(&memory, NULL, &shape, 1, by_stage, &limits, NULL, &error), "plan");
    REFUSED(cf_memory_limits(&memory, plan, NULL, 1, by_stage, &limits, NULL, &error), "shape");
    REFUSED(cf_memory_limits(&memory, plan, &shape, 0, by_stage, &limits, NULL, &error), "limit_bytes");
    REFUSED(cf_memory_limits(&memory, plan, &shape, 1, NULL, &limits, NULL, &error), "by_stage");
    REFUSED(cf_memory_limits(&memory, plan, &shape, 1, by_stage, NULL, NULL, &error), "limits");
    shape.n_stages = 0;
    REFUSED(cf_memory_limits(&memory, plan, &shape, 1, by_stage, &limits, NULL, &error), "shape.n_stages");
#undef REFUSED
    cf_plan_free(plan);
}

/* Arguments that contradict each other are refused by name, and the schedule is unchanged. */
TEST(schedule_of_no_candidate) {
    fixture f;
    cf_pack_desc pack;
    cf_plan *plan = NULL, *other = NULL;
    cf_schedule *schedule = NULL;
    cf_tune_desc desc;
    cf_tuning *tuning;
    cf_error error;
    fixture_fill(&f, 4);
    tuning = tune(&f);
    REQUIRE(tuning != NULL);
    memset(&pack, 0, sizeof pack);
    pack.chunk_size = tuning->candidates[tuning->winner].chunk_size;
    REQUIRE(cf_pack(f.lengths, f.desc.batch, &pack, &plan, NULL) == CF_OK);
    pack.chunk_size++;
    REQUIRE(cf_pack(f.lengths, f.desc.batch, &pack, &other, NULL) == CF_OK);
#define REFUSED(call, result, name)                  \
    do {                                             \
        memset(&error, 0, sizeof error);             \
        CHECK_INT(call, result);                     \
        CHECK_STR(error.field, name);                \
        CHECK(schedule == NULL);                     \
    } while (0)
    REFUSED(cf_tune_schedule(NULL, tuning, 0, plan, 0, &schedule, &error), CF_ERROR_ARGUMENT, "desc");
    REFUSED(cf_tune_schedule(&f.desc, NULL, 0, plan, 0, &schedule, &error), CF_ERROR_ARGUMENT, "tuning");
    REFUSED(cf_tune_schedule(&f.desc, tuning, 0, NULL, 0, &schedule, &error), CF_ERROR_ARGUMENT, "plan");
    REFUSED(cf_tune_schedule(&f.desc, tuning, 0, plan, 0, NULL, &error), CF_ERROR_ARGUMENT, "out");
    REFUSED(cf_tune_schedule(&f.desc, tuning, -1, plan, 0, &schedule, &error), CF_ERROR_ARGUMENT, "candidate");
    REFUSED(cf_tune_schedule(&f.desc, tuning, tuning->n_candidates, plan, 0, &schedule, &error), CF_ERROR_ARGUMENT,
            "candidate");
    REFUSED(cf_tune_schedule(&f.desc, tuning, tuning->winner, other, 0, &schedule, &error), CF_ERROR_ARGUMENT,
            "plan.chunk_size");
    REFUSED(cf_tune_schedule(&f.desc, tuning, tuning->winner, plan, 1, &schedule, &error), CF_ERROR_ARGUMENT, "rank");
    desc = f.desc;
    desc.parallel.pp = 2;
    REFUSED(cf_tune_schedule(&desc, tuning, tuning->winner, plan, 0, &schedule, &error), CF_ERROR_ARGUMENT,
            "desc.parallel");
    tuning->limit_bytes = 1;
    REFUSED(cf_tune_schedule(&f.desc, tuning, tuning->winner, plan, 0, &schedule, &error), CF_ERROR_INFEASIBLE,
            "limit_bytes");
    CHECK(error.wanted > 1);
#undef REFUSED
    cf_plan_free(plan);
    cf_plan_free(other);
    cf_tuning_free(tuning);
}

TEST(error_record_untouched_on_success) {
    fixture f;
    cf_tuning *tuning = NULL;
    cf_error error;
    fixture_fill(&f, 3);
    f.desc.limit_bytes = 40 << 20;
    harness_poison(&error, sizeof error);
    CHECK_INT(cf_tune(f.lengths, COUNT(f.lengths), &f.desc, &tuning, &error), CF_OK);
    CHECK_POISON(&error, sizeof error);
    cf_tuning_free(tuning);
}

TEST(no_memory) {
    fixture f;
    harness_heap heap;
    cf_allocator allocator;
    cf_tuning *tuning = NULL;
    cf_error error;
    int64_t at, only_once;
    fixture_fill(&f, 3);
    fixture_plant(&f, 3);
    f.desc.n_chunk_sizes = 2;
    f.desc.n_ks = 2;
    f.desc.n_batches = 2;
    f.desc.limit_bytes = 40 << 20; /* so that some candidates are tried with their state moved */
    allocator.alloc = harness_alloc;
    allocator.release = harness_release;
    allocator.user = &heap;
    f.desc.allocator = &allocator;
    for (only_once = 0; only_once < 2; only_once++)
        for (at = 1;; at++) {
            cf_result r;
            cf_tuning_free(tuning);
            tuning = NULL;
            memset(&heap, 0, sizeof heap);
            heap.fail_at = at;
            heap.only_once = (int)only_once;
            r = cf_tune(f.lengths, COUNT(f.lengths), &f.desc, &tuning, &error);
            CHECK_INT(heap.faults, 0);
            if (heap.failed == 0) break;
            CHECK_INT(r, CF_ERROR_MEMORY);
            CHECK_INT(heap.live, 0);
            REQUIRE(tuning == NULL && at < 100000);
        }
    REQUIRE(tuning != NULL);
    CHECK(at > 4);
    cf_tuning_free(tuning);
    CHECK_INT(heap.faults, 0);
}

/* cf_schedule_memory reports the largest estimate over all moments, for each stage. */
TEST(memory_of_a_schedule_is_that_of_its_worst_moment) {
    const int64_t lengths[] = {9000, 700, 4100, 300, 2500, 1200, 64};
    const cf_schedule_kind orders[] = {CF_SCHEDULE_PAPER, CF_SCHEDULE_INTERLEAVED, CF_SCHEDULE_ZERO_BUBBLE,
                                       CF_SCHEDULE_ZERO_BUBBLE, CF_SCHEDULE_PAPER};
    int64_t which, stage, i, n;
    for (which = 0; which < 5; which++) { /* the fourth in a V */
        cf_schedule_desc order = {0};
        cf_memory_desc memory = {0};
        cf_plan *plan = NULL;
        cf_schedule *schedule = NULL;
        cf_memory_report reports[2], moment[2];
        cf_error error;
        order.kind = orders[which];
        order.shape.n_stages = 2;
        order.shape.k = 2;
        if (which == 4) order.shape.replay = CF_REPLAY_PIPELINE;
        memory.model = cf_model_find("qwen2.5-0.5b");
        memory.parallel.pp = 2;
        memory.parallel.n_virtual = order.shape.n_virtual = which % 2 + 1;
        memory.parallel.placement = order.shape.placement = which == 3 ? CF_PLACEMENT_V : CF_PLACEMENT_LOOP;
        plan = naive_pack(lengths, 7, 2048);
        CHECK_INT(cf_schedule_make(plan, &order, &schedule, NULL), CF_OK);
        REQUIRE(plan != NULL && schedule != NULL);
        CHECK_INT(cf_schedule_memory(&memory, plan, schedule, reports, 2, NULL, &error), CF_OK);
        for (stage = 0; stage < 2; stage++) {
            cf_memory_load loads[400], all[4];
            int64_t most = 0, n_virtual = schedule->shape.n_virtual, v;
            n = schedule->first[stage + 1] - schedule->first[stage];
            CHECK_INT(cf_schedule_loads(plan, schedule, stage, loads, 400, NULL), CF_OK);
            for (i = 0; i < n; i++) {
                memset(all, 0, sizeof all);
                for (v = 0; v < n_virtual; v++)
                    all[which == 3 && v == 1 ? 3 - stage : v * 2 + stage] = loads[i * n_virtual + v];
                CHECK_INT(cf_memory_estimate(&memory, all, 2 * n_virtual, moment, 2, NULL), CF_OK);
                if (moment[stage].total > most) most = moment[stage].total;
            }
            CHECK_INT(reports[stage].total, most);
        }
        memory.parallel.pp = 3;
        CHECK_INT(cf_schedule_memory(&memory, plan, schedule, reports, 2, NULL, &error), CF_ERROR_ARGUMENT);
        CHECK_STR(error.field, "parallel.pp");
        memory.parallel.pp = 2;
        CHECK_INT(cf_schedule_memory(&memory, plan, schedule, reports, 1, NULL, &error), CF_ERROR_ARGUMENT);
        CHECK_STR(error.field, "n_reports");
        memory.parallel.placement = which == 3 ? CF_PLACEMENT_LOOP : CF_PLACEMENT_V;
        CHECK_INT(cf_schedule_memory(&memory, plan, schedule, reports, 2, NULL, &error), CF_ERROR_ARGUMENT);
        CHECK_STR(error.field, "parallel.placement");
        memory.parallel.n_virtual = 3;
        CHECK_INT(cf_schedule_memory(&memory, plan, schedule, reports, 2, NULL, &error), CF_ERROR_ARGUMENT);
        CHECK_STR(error.field, "parallel.n_virtual");
        CHECK_INT(cf_schedule_memory(NULL, plan, schedule, reports, 2, NULL, &error), CF_ERROR_ARGUMENT);
        cf_schedule_free(schedule);
        cf_plan_free(plan);
    }
}

/* The same for random schedules of many kinds of models, with and without streamed state: the worst moment is found. */
TEST(no_moment_needs_more_than_is_reported) {
    static const char *const names[] = {"qwen2.5-7b", "gpt-oss-20b", "qwen3-next-80b-a3b", "deepseek-v3"};
    int64_t round, stage, i, j, least, most;
    int streams = 0, at_inputs = 0;
    for (round = 0; round < harness_rounds(2000, 250); round++) {
        harness_rng rng = {71000 + (uint64_t)round};
        cf_schedule_desc order = {0};
        cf_memory_desc memory = {0};
        cf_plan *plan = NULL;
        cf_schedule *schedule = NULL;
        cf_memory_report reports[3], moment[3];
        int64_t lengths[12], n = harness_between(&rng, 1, 12), n_stages = harness_between(&rng, 1, 3), n_virtual;
        for (i = 0; i < n; i++) lengths[i] = harness_between(&rng, 1, harness_chance(&rng, 0.3) ? 30000 : 4000);
        order.kind = (cf_schedule_kind)harness_between(&rng, 1, CF_SCHEDULE_COUNT - 1);
        order.max_tries = 5;
        order.shape.n_stages = memory.parallel.pp = n_stages;
        order.shape.k = harness_between(&rng, 1, 3);
        if (order.kind >= CF_SCHEDULE_INTERLEAVED) order.shape.n_virtual = harness_between(&rng, 1, 2);
        memory.parallel.n_virtual = order.shape.n_virtual;
        memory.model = cf_model_find(names[harness_between(&rng, 0, COUNT(names) - 1)]);
        memory.parallel.recompute = (cf_recompute)harness_between(&rng, 0, CF_RECOMPUTE_COUNT - 1);
        memory.parallel.tp = (int64_t)1 << harness_between(&rng, 0, 2);
        if (harness_chance(&rng, 0.7)) memory.state_window = harness_between(&rng, 100, 20000);
        memory.chunk_size = 2048;
        REQUIRE(memory.model != NULL && (plan = naive_pack(lengths, n, 2048)) != NULL);
        REQUIRE(cf_schedule_make(plan, &order, &schedule, NULL) == CF_OK);
        n_virtual = schedule->shape.n_virtual;
        REQUIRE(cf_schedule_memory(&memory, plan, schedule, reports, n_stages, NULL, NULL) == CF_OK);
        harness_note("seed %d: %s", 71000 + (int)round, memory.model->name);
        for (stage = 0; stage < n_stages; stage++) {
            static cf_memory_load loads[20000];
            cf_memory_load all[6], peak = {0};
            int64_t count = schedule->first[stage + 1] - schedule->first[stage];
            REQUIRE(cf_schedule_loads(plan, schedule, stage, loads, COUNT(loads), NULL) == CF_OK);
            for (most = 0, i = 0; i < count * n_virtual; i++) { /* the ring exists if it ever holds anything */
                least = loads[i].state_tokens > 0;
                for (j = i % n_virtual; j < count * n_virtual && least; j += n_virtual)
                    if (loads[j].state_tokens == 0) loads[j].state_tokens = memory.state_window > 0;
            }
            for (i = 0; i < count; i++) {
                memset(all, 0, sizeof all);
                for (j = 0; j < n_virtual; j++) all[j * n_stages + stage] = loads[i * n_virtual + j];
                REQUIRE(cf_memory_estimate(&memory, all, n_stages * n_virtual, moment, n_stages, NULL) == CF_OK);
                CHECK(moment[stage].host <= reports[stage].host);
                if (moment[stage].total <= most) continue;
                most = moment[stage].total;
                peak = loads[i * n_virtual];
            }
            CHECK_INT(reports[stage].total, most);
            streams += memory.state_window > 0;
            at_inputs += memory.state_window > 0 && peak.input_tokens > 0;
        }
        cf_schedule_free(schedule);
        cf_plan_free(plan);
    }
    harness_report("%d streamed, %d with inputs kept at the peak", streams, at_inputs);
    CHECK(streams > 100 && at_inputs > 20);
}

/* With n_gpus and experts, an ep of 0 is tried as 1, as the largest of a node of four GPUs, and as the largest of all
   eight. A given ep stays. A candidate's memory is its schedule's, including recurrent borders. */
TEST(experts_are_tried_where_a_node_allows) {
    static const char *const names[] = {"qwen3.5-35b-a3b", "qwen3-8b"};
    const int64_t lengths[] = {40000, 900, 3000, 5000, 800, 700, 16000, 200}, size = 8192, k = 1;
    const cf_schedule_kind paper = CF_SCHEDULE_PAPER;
    const cf_replay local = CF_REPLAY_LOCAL;
    int64_t given, i, m;
    for (m = 0; m < 2; m++)
        for (given = 0; given <= 4 && (m == 0 || given == 0); given += 4) { /* an ep of 4 without experts is refused */
            cf_tune_desc desc = {0};
            cf_tuning *tuning = NULL;
            cf_error error;
            int64_t whole = 0, spread = 0, beyond = 0;
            desc.model = cf_model_find(names[m]);
            desc.gpu = cf_gpu_find("h200");
            desc.n_gpus = 8;
            desc.gpus_per_node = 4;
            desc.parallel.tp = 1;
            desc.parallel.zero = 1;
            desc.parallel.ep = given;
            desc.parallel.recompute = CF_RECOMPUTE_FULL;
            desc.chunk_sizes = &size;
            desc.ks = &k;
            desc.kinds = &paper;
            desc.replays = &local;
            desc.n_chunk_sizes = desc.n_ks = desc.n_kinds = desc.n_replays = desc.n_batches = 1;
            desc.batch = COUNT(lengths);
            if (cf_tune(lengths, COUNT(lengths), &desc, &tuning, &error) != CF_OK) FAIL("%s", error.text);
            if (tuning == NULL) continue;
            harness_note("%s, ep %d", names[m], (int)given);
            for (i = 0; i < tuning->n_splits; i++) {
                const cf_parallel *split = &tuning->splits[i];
                whole += split->ep > 1;
                spread += split->ep == 1;
                if (given > 0) CHECK_INT(split->ep, given);
                if (split->ep > 1 && given == 0) /* of 8, which divide 256 experts */
                    CHECK(split->ep == split->dp || (split->ep == 4 && split->dp == 8));
                beyond += split->ep == 8;
            }
            if (given == 0) CHECK(spread > 0 && whole == (m == 0 ? 4 : 0) && beyond == (m == 0));
            CHECK(tuning->winner >= 0);
            if (tuning->winner >= 0) CHECK(tuning->candidates[tuning->winner].bytes <= tuning->limit_bytes);
            cf_tuning_free(tuning);
        }
}

SUITE(tune, CASE(experts_are_tried_where_a_node_allows),
      CASE(memory_of_a_schedule_is_that_of_its_worst_moment), CASE(no_moment_needs_more_than_is_reported),
      CASE(limits_of_memory_are_those_of_the_search), CASE(limits_of_memory_refuse),
      CASE(equals_brute_force), CASE(equals_brute_force_on_trees), CASE(equals_brute_force_on_ranks),
      CASE(equals_brute_force_with_cp_groups),
      CASE(equals_brute_force_on_splits),
      CASE(the_longest_sequence_is_a_chunk_size),
      CASE(equals_brute_force_on_virtual_stages), CASE(peak_is_the_walk_s), CASE(limit_is_kept),
      CASE(limit_is_kept_by_trees), CASE(limit_below_the_parameters), CASE(a_window_makes_room),
      CASE(streams_where_memory_forbids_the_rest), CASE(recomputes_where_memory_forbids_the_rest),
      CASE(keeps_outputs_where_they_fit), CASE(ranks_run_in_step_where_they_meet),
      CASE(a_race_finds_the_fastest), CASE(a_race_looks_at_long_sequences),
      CASE(even_sizes_are_tried),
      CASE(the_winner_is_thrifty_and_simple), CASE(a_reserve_stays_free), CASE(a_context_is_a_promise_of_memory),
      CASE(intervals), CASE(same_seed_same_answer),
      CASE(pruning_changes_nothing), CASE(whole_list_as_a_batch), CASE(rounding_is_no_uncertainty), CASE(sequences_without_tokens),
      CASE(progress_ends_with_the_work), CASE(interruption), CASE(splits_of_gpus),
      CASE(more_ranks_than_sequences_where_groups_share_them), CASE(measured_costs),
      CASE(own_bytes_are_as_good_as_a_model), CASE(own_bytes_by_hand), CASE(bad_descriptions), CASE(bad_bytes),
      CASE(bad_lengths), CASE(error_record_untouched_on_success), CASE(no_memory), CASE(schedule_of_a_candidate),
      CASE(schedule_of_no_candidate));
