/* Tests cp groups: one sequence over several ranks. Damaged plans are compared with the oracle, rows and metadata with
   counting. (test_problem has undamaged plans.) */

#include "chunkflow.h"
#include "../harness.h"
#include "../reference/naive.h"
#include "../reference/oracle.h"
#include "../reference/pipeline.h"
#include "tools/chunkflow_tune.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#define MOST_RANKS 16

/* ---- what is drawn ---- */

typedef struct cp_groups {
    int64_t lengths[24], n;
    cf_pack_desc pack;
    cf_plan *plan;
    cf_schedule *schedules[MOST_RANKS];
    cf_error error;
} cp_groups;

static void draw(harness_rng *rng, cp_groups *t) {
    static const int64_t sizes[] = {8, 32, 100}, ranks[] = {2, 4, 6, 8, 12, 16};
    int64_t i;
    memset(t, 0, sizeof *t);
    t->n = harness_between(rng, 0, 20);
    t->pack.chunk_size = sizes[harness_between(rng, 0, 2)];
    for (i = 0; i < t->n; i++)
        t->lengths[i] = harness_between(rng, 0, t->pack.chunk_size * (harness_between(rng, 0, 2) == 0 ? 30 : 1));
    t->pack.n_ranks = ranks[harness_between(rng, 0, 5)];
    t->pack.max_cp = harness_between(rng, 2, t->pack.n_ranks);
    if (harness_between(rng, 0, 2) == 0) t->pack.align = t->pack.chunk_size == 8 && harness_between(rng, 0, 1) ? 8 : 4;
    t->pack.max_slices = harness_between(rng, 0, 3) == 0 ? 3 : 0;
    t->pack.no_tails = harness_between(rng, 0, 3) == 0;
    t->pack.split = (cf_split_method)harness_between(rng, 0, CF_SPLIT_COUNT - 1);
    t->pack.cost.constant = (double)harness_between(rng, 0, 1) * 10;
    t->pack.cost.per_token = (double)harness_between(rng, 0, 3) / 2;
    t->pack.cost.per_pair = (double)harness_between(rng, 0, 2) / 32;
    t->pack.cp_row_seconds = (double)harness_between(rng, 0, 2) / 100;
    t->pack.lockstep = harness_between(rng, 0, 1); /* implied */
}

static int pack(cp_groups *t) { return cf_pack(t->lengths, t->n, &t->pack, &t->plan, &t->error) == CF_OK; }

static void drop(cp_groups *t) {
    int64_t rank;
    for (rank = 0; rank < MOST_RANKS; rank++) {
        cf_schedule_free(t->schedules[rank]);
        t->schedules[rank] = NULL;
    }
    cf_plan_free(t->plan);
    t->plan = NULL;
}

static const cf_schedule *const *all(const cp_groups *t) { return (const cf_schedule *const *)t->schedules; }

static int64_t cp_of(const cf_plan *plan, int64_t chunk) {
    return plan->chunks[chunk].chain >= 0 ? plan->chains[plan->chunks[chunk].chain].cp : 0;
}

/* Makes the schedule of every rank from one list of columns: in lockstep, or by `paper` on one stage. */
static int schedule(cp_groups *t, const cf_schedule_desc *lockstep) {
    const cf_schedule_desc plain = {.kind = CF_SCHEDULE_PAPER, .shape = {.k = 1 + t->n % 2}};
    cf_plan *columns = NULL;
    cf_schedule *list = NULL;
    int64_t rank, i;
    int ok = cf_lockstep_plan(t->plan, &t->pack.cost, NULL, &columns, &t->error) == CF_OK &&
             cf_schedule_make(columns, lockstep ? lockstep : &plain, &list, &t->error) == CF_OK;
    for (i = 0; ok && i < columns->n_chunks; i++)
        CHECK(columns->chunks[i].pairs >= 0 && (columns->chunks[i].n_slices > 0 || columns->chunks[i].pairs == 0));
    for (rank = 0; rank < t->plan->n_ranks && ok; rank++)
        ok = cf_lockstep_schedule(t->plan, list, rank, NULL, &t->schedules[rank], &t->error) == CF_OK;
    cf_schedule_free(list);
    cf_plan_free(columns);
    return ok;
}

/* ---- plans ---- */

TEST(packing_cp_groups_needs_what_pack_size_says) {
    int i;
    for (i = 0; i < harness_rounds(2000, 200); i++) {
        harness_rng rng = {92000 + (uint64_t)i};
        cp_groups t;
        cf_plan *other = NULL;
        size_t bytes = 0;
        void *memory;
        int64_t j;
        draw(&rng, &t);
        if (i % 2) { /* a few expensive sequences, and so many cheap ones that one rank would have them all */
            t.n = 24;
            t.pack.cost.per_token = 0;
            t.pack.cost.per_pair = 1;
            for (j = 0; j < t.n; j++) t.lengths[j] = j < 3 ? t.pack.chunk_size : 1;
        }
        REQUIRE(pack(&t));
        REQUIRE(cf_pack_size(t.lengths, t.n, &t.pack, &bytes, NULL) == CF_OK);
        memory = malloc(bytes);
        REQUIRE(memory != NULL);
        if (CHECK_INT(cf_pack_into(t.lengths, t.n, &t.pack, memory, bytes, &other, NULL), CF_OK)) {
            CHECK_INT(other->n_chunks, t.plan->n_chunks);
            CHECK(memcmp(other->chunks, t.plan->chunks, (size_t)t.plan->n_chunks * sizeof(cf_chunk)) == 0);
            CHECK(memcmp(other->slices, t.plan->slices, (size_t)t.plan->n_slices * sizeof(cf_slice)) == 0);
            CHECK(memcmp(other->chains, t.plan->chains, (size_t)t.plan->n_chains * sizeof(cf_chain)) == 0);
        }
        free(memory);
        drop(&t);
    }
}

/* A giant among short sequences. No rank has much more than the mean, and in each column no rank waits for another. */
TEST(cp_groups_even_out_giants) {
    static const int64_t giants[] = {131072, 262144, 1000000};
    int turn;
    for (turn = 0; turn < 3; turn++) {
        harness_rng rng = {7};
        int64_t lengths[256], i, j;
        cf_pack_desc desc = {.chunk_size = 8192, .n_ranks = 32, .max_cp = 32, .cost = {0, 1, 2.64e-5}};
        cf_plan *plan = NULL;
        cf_plan_stats stats;
        for (i = 0; i < 256; i++) lengths[i] = harness_between(&rng, 20, 3000);
        lengths[100] = giants[turn];
        REQUIRE(cf_pack(lengths, 256, &desc, &plan, NULL) == CF_OK);
        CHECK_INT(cf_plan_validate(plan, lengths, 256, NULL, NULL), CF_OK);
        cf_plan_measure(plan, &desc.cost, &stats);
        CHECK(stats.rank_imbalance <= 1.02);
        CHECK_INT(plan->chains[0].cp, 32);
        for (j = 0; j < plan->chains[0].n_chunks; j++) {
            double sum = 0, most = 0;
            for (i = 0; i < 32; i++) {
                const cf_slice *s = &plan->slices[plan->chunks[i * plan->chunks_per_rank + j].first_slice];
                double seconds = cf_cost_seconds(&desc.cost, s->length, cf_slice_pairs(s->begin, s->length));
                sum += seconds;
                most = fmax(most, seconds);
            }
            CHECK(most <= 1.002 * sum / 32);
        }
        cf_plan_free(plan);
    }
}

/* Returns the cost of a plan's columns, by which cf_pack weighs layouts. A column replayed with K 1 costs a third more:
   every column of a chain of columns except its last. */
static double price_of(const cp_groups *t) {
    cf_plan *columns = NULL;
    double sum = 0;
    int64_t i, rank;
    if (!CHECK_INT(cf_lockstep_plan(t->plan, &t->pack.cost, NULL, &columns, NULL), CF_OK)) return 0;
    for (i = 0; i < t->plan->chunks_per_rank; i++) {
        const cf_chunk *of = &columns->chunks[i];
        double most = 0;
        for (rank = 0; rank < t->plan->n_ranks; rank++) {
            const cf_chunk *c = &t->plan->chunks[rank * t->plan->chunks_per_rank + i];
            double own = c->n_slices > 0 ? cf_cost_seconds(&t->pack.cost, c->rows, c->pairs) : 0;
            if (cp_of(t->plan, rank * t->plan->chunks_per_rank + i) > 0)
                own += t->pack.cp_row_seconds * (double)(t->plan->slices[c->first_slice].begin - c->prefix);
            most = fmax(most, own);
        }
        sum += most;
        if (of->chain >= 0 && of->index + 1 < columns->chains[of->chain].n_chunks) sum += most / 3;
    }
    cf_plan_free(columns);
    return sum;
}

/* A larger max_cp is never worse than a smaller one, or than none, because the layouts of the smaller one are tried as
   well. */
TEST(larger_bounds_of_cp_groups_are_never_worse) {
    int i, better = 0;
    for (i = 0; i < harness_rounds(2000, 200); i++) {
        harness_rng rng = {99000 + (uint64_t)i};
        cp_groups t;
        double before = 0;
        int64_t cp;
        draw(&rng, &t);
        t.pack.lockstep = 1;
        t.pack.cost.per_token = 1;
        harness_note("seed %d: chunk size %d, ranks %d", 99000 + i, (int)t.pack.chunk_size, (int)t.pack.n_ranks);
        for (cp = 1; cp <= t.pack.n_ranks; cp++) {
            double price;
            t.pack.max_cp = cp;
            REQUIRE(pack(&t));
            price = price_of(&t);
            if (cp > 1) CHECK(price <= before * (1 + 1e-9));
            better += cp > 1 && price < before * 0.999;
            before = price;
            drop(&t);
        }
    }
    harness_report("%d times better", better);
    CHECK(better > 20);
}

/* Gathering rows from other ranks costs time. Above some price no sequence is spread any more. */
TEST(dear_transfers_make_cp_groups_narrow) {
    const int64_t lengths[] = {8000, 900, 900, 900, 900, 900, 900, 900, 900};
    static const double prices[] = {0, 0.5, 100};
    int64_t widest = 8;
    int turn;
    for (turn = 0; turn < 3; turn++) {
        cf_pack_desc desc = {.chunk_size = 1000, .n_ranks = 8, .max_cp = 8, .cost = {0, 1, 0}};
        cf_plan *plan = NULL;
        desc.cp_row_seconds = prices[turn];
        REQUIRE(cf_pack(lengths, 9, &desc, &plan, NULL) == CF_OK);
        if (turn == 0) CHECK_INT(plan->chains[0].cp, 8);
        if (turn == 2) CHECK_INT(plan->chains[0].cp, 0);
        CHECK(plan->chains[0].cp <= widest);
        widest = plan->chains[0].cp;
        cf_plan_free(plan);
    }
}

/* ---- what a chunk is told ---- */

static void check_chunk(const cp_groups *t, int64_t id) {
    static union {
        unsigned char bytes[1 << 16];
        long double aligned;
    } memory;
    static cf_kv_source pieces[4096];
    const cf_plan *plan = t->plan;
    const cf_chunk *c = &plan->chunks[id];
    const cf_slice *s = &plan->slices[c->first_slice];
    int64_t cp = cp_of(plan, id), n = cf_kv_sources(plan, id, NULL), covered = 0, i;
    cf_metadata_desc desc = {.wants_key_ends = 1};
    cf_metadata m;
    if (cp == 0) {
        CHECK_INT(n, 0);
        return;
    }
    REQUIRE(n <= 4096 && n == cf_kv_sources(plan, id, pieces));
    CHECK_INT(n, c->index * cp + c->rank % cp);
    for (i = 0; i < n; i++) {
        const cf_chunk *of = &plan->chunks[pieces[i].chunk];
        CHECK(pieces[i].begin == covered && pieces[i].tokens == plan->slices[of->first_slice].length);
        CHECK(pieces[i].rank == of->rank && pieces[i].row == of->prefix && of->rank / cp == c->rank / cp);
        CHECK(plan->slices[of->first_slice].sequence == s->sequence && of->index <= c->index);
        covered += pieces[i].tokens;
    }
    CHECK_INT(covered, s->begin);
    REQUIRE(cf_metadata_fill(plan, id, &desc, &memory, sizeof memory, &m, NULL) == CF_OK);
    CHECK_INT(m.prefix, s->begin);
    CHECK(m.cu_seqlens_q[1] == s->length && m.cu_seqlens_k[1] == s->begin + s->length);
    CHECK(m.position_ids[0] == s->begin && m.position_ids[s->length - 1] == s->begin + s->length - 1);
    CHECK_INT(m.target_positions[s->length - 1],
              s->begin + s->length < t->lengths[s->sequence] ? s->begin + s->length : -1);
    for (i = 0; i < s->begin + s->length; i++) CHECK_INT(m.key_ends[i], s->length);
}

TEST(chunks_of_cp_groups_see_the_rows_of_all_ranks) {
    int i;
    for (i = 0; i < harness_rounds(1000, 100); i++) {
        harness_rng rng = {93000 + (uint64_t)i};
        cp_groups t;
        cf_capacity capacity = {0};
        int64_t j, longest = 0;
        draw(&rng, &t);
        REQUIRE(pack(&t));
        for (j = 0; j < t.plan->n_chunks; j++) {
            check_chunk(&t, j);
            if (t.plan->chunks[j].chain >= 0)
                longest = longest > t.plan->slices[t.plan->chunks[j].first_slice].begin
                              ? longest
                              : t.plan->slices[t.plan->chunks[j].first_slice].begin;
        }
        CHECK_INT(cf_steps_capacity(t.plan, NULL, &capacity, NULL), CF_OK);
        CHECK_INT(capacity.prefix, longest);
        drop(&t);
    }
    CHECK_INT(cf_kv_sources(NULL, 0, NULL), 0);
}

/* State counts a rank's own rows. Over all ranks these add up to the sequence's. */
TEST(state_is_of_own_rows) {
    cp_groups t = {.lengths = {3000, 20, 30}, .n = 3, .pack = {.chunk_size = 100, .n_ranks = 4, .max_cp = 4}};
    cf_simulate_desc how = {0};
    int64_t rank, sum = 0, peaks = 0;
    REQUIRE(pack(&t) && t.plan->chains[0].cp == 4 && schedule(&t, NULL));
    for (rank = 0; rank < 4; rank++) {
        cf_timeline *timeline = NULL;
        REQUIRE(cf_simulate(t.plan, t.schedules[rank], &how, &timeline, NULL) == CF_OK);
        peaks += timeline->peak_state_tokens[0];
        sum += t.plan->chains[rank].tokens;
        cf_timeline_free(timeline);
    }
    CHECK_INT(sum, 3000);
    CHECK(peaks >= 3000 && peaks <= 3000 + 4 * 100);
    drop(&t);
}

TEST(memory_has_the_gathered_layer) {
    cf_memory_desc desc = {0};
    cf_memory_load load = {.live_tokens = 1000, .chunk_tokens = 1000, .state_tokens = 5000};
    cf_memory_report without, with;
    desc.model = cf_model_find("qwen2.5-7b");
    REQUIRE(cf_memory_estimate(&desc, &load, 1, &without, 1, NULL) == CF_OK);
    desc.gathered = 40000;
    REQUIRE(cf_memory_estimate(&desc, &load, 1, &with, 1, NULL) == CF_OK);
    CHECK_INT(with.buffers - without.buffers, 40000 * (int64_t)(2 * 4 * 128) * (2 + 4)); /* K, V, 4 heads of 128 */
    CHECK_INT(with.state, without.state);
    desc.model = cf_model_find("qwen3.5-27b"); /* 48 heads of 128 x 128 are recurrent; K and V have 4 heads of 256 */
    REQUIRE(cf_memory_estimate(&desc, &load, 1, &with, 1, NULL) == CF_OK);
    desc.gathered = 0;
    REQUIRE(cf_memory_estimate(&desc, &load, 1, &without, 1, NULL) == CF_OK);
    CHECK_INT(with.buffers - without.buffers, 40000 * (int64_t)(2 * 4 * 256) * (2 + 4) + 1000 * 2 * 48 * 128 +
                                              4 * 5 * 48 * 128 * 128);
    desc.gathered = -1;
    CHECK_INT(cf_memory_estimate(&desc, &load, 1, &with, 1, NULL), CF_ERROR_ARGUMENT);
}

/* Returns the width of a batch's widest cp group. The batch has a sequence of `first` tokens and n sequences of
   `others`. */
static int64_t widest_of(cf_pack_desc desc, int64_t first, int64_t n, int64_t others, cf_plan **out) {
    int64_t lengths[4096], i, widest = 0;
    cf_plan *plan = NULL;
    cf_error error = {0};
    for (lengths[0] = first, i = 1; i <= n; i++) lengths[i] = others;
    if (cf_pack(lengths, n + 1, &desc, &plan, &error) != CF_OK) FAIL("%s", error.text);
    else CHECK_INT(cf_plan_validate(plan, lengths, n + 1, NULL, &error), CF_OK);
    for (i = 0; plan != NULL && i < plan->n_chains; i++)
        if (plan->chains[i].cp > widest) widest = plan->chains[i].cp;
    if (out != NULL) *out = plan;
    else cf_plan_free(plan);
    return widest;
}

/* Checks widths against cf_pack's rule, worked out by hand. */
TEST(widths_are_what_they_cost) {
    cf_pack_desc thin = {.chunk_size = 8192, .n_ranks = 8, .max_cp = 8, .cost = {0, 1, 0}}, costly = thin;
    cf_pack_desc scanned = thin, chunky = thin;
    cf_plan *plan = NULL;
    CHECK_INT(widest_of(thin, 8 * 512, 0, 0, NULL), 8); /* 512 tokens a rank are enough */
    CHECK_INT(widest_of(thin, 8 * 511, 0, 0, NULL), 4);
    /* Two ranks: 4 columns, 5000 with replays, plus 4000 x 2 for gathered rows. One rank: 10333 with replays. */
    costly.chunk_size = 1000;
    costly.cp_row_seconds = 0.6;
    CHECK(widest_of(costly, 8000, 8, 900, NULL) > 0);
    costly.cp_row_seconds = 0.75;
    CHECK_INT(widest_of(costly, 8000, 8, 900, NULL), 0);
    /* One rank runs 8 chunks of 1000 each. Two ranks run 4 columns, each of 1000 plus a scan. */
    scanned.chunk_size = 1000;
    scanned.n_ranks = scanned.max_cp = 2;
    scanned.cp_chunk_seconds = 900;
    CHECK_INT(widest_of(scanned, 8000, 0, 0, NULL), 2);
    scanned.cp_chunk_seconds = 1100;
    CHECK_INT(widest_of(scanned, 8000, 0, 0, NULL), 0);
    /* Short sequences pay their share of a chunk: all 90 of them together cost as much as the one of 900. */
    chunky.chunk_size = 1000;
    chunky.n_ranks = chunky.max_cp = 2;
    chunky.cost.constant = 1000;
    chunky.cp_row_seconds = 1e9;
    CHECK_INT(widest_of(chunky, 900, 90, 10, &plan), 0);
    CHECK(plan != NULL && plan->chunks_per_rank == 1);
    cf_plan_free(plan);
}

/* The numbers of shares and columns stay within their arrays, even if costs favour more. */
TEST(cp_groups_stay_within_their_room) {
    cf_pack_desc many = {.chunk_size = 10, .n_ranks = 64, .max_cp = 64, .cost = {0, 1, 0}};
    cf_pack_desc steep = {.chunk_size = 2, .n_ranks = 4, .max_cp = 4, .cost = {0, 0, 1}}; /* one token for two */
    cf_pack_desc lone = {.chunk_size = 100, .n_ranks = 2, .max_cp = 2, .max_slices = 1, .cost = {0, 1, 0}};
    cf_pack_desc tight = {.chunk_size = 8, .n_ranks = 2, .max_cp = 2, .align = 4, .cost = {0, 1, 0}};
    int64_t all = 0, i;
    cf_plan *plan = NULL;
    CHECK_INT(widest_of(lone, 1, 2000, 1, NULL), 0); /* a chunk for each token */
    CHECK_INT(widest_of(tight, 160, 0, 0, NULL), 2); /* a chunk is two alignment units */
    CHECK(widest_of(many, 1000, 299, 1000, &plan) > 0);
    REQUIRE(plan != NULL);
    for (i = 0; i < plan->n_chains; i++) all += plan->chains[i].cp > 0;
    CHECK(all > 512 && all <= 16 * 64);
    cf_plan_free(plan);
    CHECK(widest_of(steep, 1280, 0, 0, &plan) == 4);
    CHECK(plan->chains[0].n_chunks <= 2 * 1280 / (4 * 2) + 6);
    cf_plan_free(plan);
}

/* ---- how long ---- */

/* A pass of a cp group takes as long as its slowest rank, gathers included. */
TEST(passes_of_cp_groups_take_as_long_as_the_slowest_rank) {
    int i, waits = 0;
    for (i = 0; i < 60; i++) {
        harness_rng rng = {97000 + (uint64_t)i};
        cf_schedule_desc columns = {.kind = CF_SCHEDULE_ZERO_BUBBLE};
        cf_timing timing = {.all = {.forward = {1, 1, 0.03}, .backward = {2, 2, 0.07}, .input = {1, 1, 0.05},
                                    .weight = {2, 1, 0}},
                            .stream_exposed = i % 3 > 0 ? 0.25 : 0};
        cf_simulate_desc simulate = {.timing = &timing};
        int64_t rank, j;
        cp_groups t;
        draw(&rng, &t);
        if (i % 3 > 0) timing.gather_forward = 0.25, timing.gather_backward = 0.125;
        if (i % 3 > 1) timing.stream_forward = timing.stream_backward = 0.5;
        if (i % 2) timing.scan_forward = 3, timing.scan_backward = 5;
        harness_note("seed %d", 97000 + i);
        REQUIRE(pack(&t) && schedule(&t, i % 2 ? &columns : NULL));
        for (rank = 0; rank < t.plan->n_ranks; rank++) {
            const cf_schedule *s = t.schedules[rank];
            cf_timeline *timeline = NULL;
            REQUIRE(cf_simulate(t.plan, s, &simulate, &timeline, &t.error) == CF_OK);
            for (j = 0; j < s->n_actions; j++) {
                double seconds = pipeline_seconds(t.plan, &timing, 0, 0, s->actions[j].chunk, s->actions[j].pass);
                CHECK(fabs(timeline->end[j] - timeline->start[j] - seconds) <= 1e-9 * timeline->makespan);
            }
            waits += timeline->stream_waits > 0;
            cf_timeline_free(timeline);
        }
        drop(&t);
    }
    CHECK(waits > 50);
}

static int is_third(cf_pass_cost cost, cf_pass_cost forward, cf_pass_cost backward) {
    return fabs(3 * cost.constant - forward.constant - backward.constant) <= 4e-15 * backward.constant &&
           fabs(3 * cost.per_token - forward.per_token - backward.per_token) <= 4e-15 * backward.per_token &&
           fabs(3 * cost.per_pair - forward.per_pair - backward.per_pair) <= 4e-15 * backward.per_pair;
}

/* A GPU's numbers give the price of gathers, for the link between so many GPUs, and so the widths that cf_pack
   chooses. */
TEST(gathers_are_priced_by_model_and_gpu) {
    cf_cost_desc desc = {.chunk_size = 8192, .parallel = {.tp = 2, .dp = 16}};
    cf_stage_cost stage;
    cf_timing timing;
    cf_pack_desc pack = {0};
    cf_error error;
    int64_t cp;
    desc.model = cf_model_find("qwen2.5-7b");
    desc.gpu = cf_gpu_find("h100-80g");
    for (cp = 0; cp <= 8; cp += 4) {
        const double rate = 0.75 * (cp == 4 ? 450e9 : 50e9), row = cp > 0 ? 28 * 2 * 2 * 128 * 2 / rate : 0;
        desc.max_cp = cp;
        REQUIRE(cf_cost_estimate(&desc, &stage, 1, &timing, NULL, NULL) == CF_OK);
        CHECK(fabs(timing.gather_forward - row) <= 1e-12 * row);
        CHECK(fabs(timing.gather_backward - 3 * row) <= 3e-12 * row);
        CHECK(fabs(timing.stream_exposed - (cp > 0 ? 1 / 28.0 : 0)) < 1e-15 && !(timing.stream_backward > 0));
        cf_cp_costs(&timing, &pack);
        CHECK(is_third(pack.cost, stage.forward, stage.backward));
        CHECK(fabs(3 * pack.cp_row_seconds - 4 * row / 28) <= 1e-12 * row);
    }
    timing.stages = NULL;
    timing.all.forward = stage.backward;
    timing.all.backward = stage.forward;
    memset(&pack.cost, 0, sizeof pack.cost);
    cf_cp_costs(&timing, &pack);
    CHECK(is_third(pack.cost, stage.forward, stage.backward));
    desc.max_cp = -1;
    CHECK_INT(cf_cost_estimate(&desc, &stage, 1, &timing, NULL, &error), CF_ERROR_ARGUMENT);
    CHECK_STR(error.field, "max_cp");
}

/* Qwen3.5-27B on 8 H100, two GPUs a rank, by hand: 48 delta layers, each with 24 heads of 128 x 128 on a GPU, 8 heads
   of keys, and 3 rows of a convolution. Each of four ranks scans 6 heads. It sends an effect and a state of each of the
   18 others, and two states of its own to each of three ranks. */
TEST(scans_of_recurrent_layers_are_priced) {
    const double state = 24.0 * 128 * 128, columns = 2 * 8.0 * 128 + 24 * 128, rate = 0.75 * 450e9;
    const double row = 2 * state + 6 * state + 256 * 128.0 * 24;
    cf_cost_desc desc = {.chunk_size = 8192, .max_cp = 4, .parallel = {.tp = 2, .dp = 4}};
    cf_gpu gpu = *cf_gpu_find("h100-80g");
    cf_stage_cost stage, alone;
    cf_timing timing;
    cf_pack_desc pack = {0};
    double layer;
    desc.model = cf_model_find("qwen3.5-27b");
    desc.gpu = &gpu;
    layer = 8192 * row / (gpu.flops * gpu.attention_forward) + 4 * 6 * 2 * 128.0 * 128 * 128 / (gpu.flops * gpu.gemm);
    layer += (4 * 18 * (2 + 2) * 128 * 128.0 + 3 * 2 * 3 * columns) / rate + 3 * gpu.latency + 7 * gpu.launch;
    REQUIRE(cf_cost_estimate(&desc, &stage, 1, &timing, NULL, NULL) == CF_OK);
    CHECK(fabs(timing.scan_forward - 48 * layer) <= 1e-12 * layer * 48);
    CHECK(fabs(timing.scan_backward - 48 * layer) <= 1e-12 * layer * 48);
    cf_cp_costs(&timing, &pack);
    CHECK(fabs(pack.cp_chunk_seconds - 32 * layer) <= 1e-12 * layer * 32);
    desc.max_cp = 0;
    REQUIRE(cf_cost_estimate(&desc, &alone, 1, &timing, NULL, NULL) == CF_OK);
    CHECK(memcmp(&alone, &stage, sizeof alone) == 0 && !(timing.scan_forward > 0) && !(timing.scan_backward > 0));
    desc.max_cp = 4;
    desc.model = cf_model_find("qwen2.5-7b");
    REQUIRE(cf_cost_estimate(&desc, &stage, 1, &timing, NULL, NULL) == CF_OK);
    CHECK(!(timing.scan_forward > 0) && timing.gather_forward > 0);
}

/* ---- what is refused ---- */

static void refused(cf_result result, const cf_error *e, cf_result code, const char *field) {
    CHECK_INT(result, code);
    CHECK_STR(e->field, field);
}

TEST(cp_groups_that_cannot_be_are_named) {
    cp_groups t = {.lengths = {300, 20, 30}, .n = 3, .pack = {.chunk_size = 16, .n_ranks = 4, .max_cp = 5}};
    const cf_shared_prefix alike[3] = {{0, 0}, {0, 20}, {0, 0}};
    cf_schedule_desc order = {0};
    cf_schedule *none = NULL;
    cf_error *e = &t.error;
    refused(cf_pack(t.lengths, 3, &t.pack, &t.plan, e), e, CF_ERROR_ARGUMENT, "max_cp");
    t.pack.max_cp = -1;
    refused(cf_pack(t.lengths, 3, &t.pack, &t.plan, e), e, CF_ERROR_ARGUMENT, "max_cp");
    t.pack.max_cp = 2;
    t.pack.max_cp = 4;
    t.pack.method = CF_PACK_NEXT_FIT;
    refused(cf_pack(t.lengths, 3, &t.pack, &t.plan, e), e, CF_ERROR_ARGUMENT, "method");
    t.pack.method = CF_PACK_DEFAULT;
    t.pack.shared_prefixes = alike;
    refused(cf_pack(t.lengths, 3, &t.pack, &t.plan, e), e, CF_ERROR_ARGUMENT, "max_cp");
    t.pack.shared_prefixes = NULL;
    t.pack.cp_row_seconds = NAN;
    refused(cf_pack(t.lengths, 3, &t.pack, &t.plan, e), e, CF_ERROR_ARGUMENT, "cp_row_seconds");
    t.pack.cp_row_seconds = 0;
    REQUIRE(pack(&t) && t.plan->chains[0].cp == 4);
    refused(cf_schedule_make(t.plan, &order, &none, e), e, CF_ERROR_ARGUMENT, "plan"); /* best */
    order.kind = CF_SCHEDULE_PAPER;
    refused(cf_schedule_make(t.plan, &order, &none, e), e, CF_ERROR_ARGUMENT, "plan");
    CHECK(none == NULL);
    drop(&t);
}

/* Changes any number of a chain, chunk or slice: the validator and the oracle agree. */
TEST(random_damage_to_cp_groups_is_judged_as_by_the_oracle) {
    int i, damaged = 0, sound = 0;
    for (i = 0; i < harness_rounds(3000, 300); i++) {
        harness_rng rng = {94000 + (uint64_t)i};
        cp_groups t;
        int turn;
        draw(&rng, &t);
        REQUIRE(pack(&t));
        for (turn = 0; turn < 30 && t.plan->n_chains > 0; turn++) {
            cf_chain *g = &t.plan->chains[harness_between(&rng, 0, t.plan->n_chains - 1)];
            cf_chunk *c = &t.plan->chunks[g->first_chunk];
            int64_t *numbers[] = {&g->cp,   &g->sequence, &g->n_chunks, &g->tokens, &g->cp, &g->first_chunk,
                                  &c->prefix, &c->chain,    &t.plan->slices[c->first_slice].begin};
            int64_t *number = numbers[harness_between(&rng, 0, 8)], before = *number, other = g->cp;
            const char *fault;
            *number = harness_between(&rng, 0, 1) ? harness_between(&rng, 0, 4) : before + harness_between(&rng, -1, 1);
            if (harness_between(&rng, 0, 3) == 0) g->cp = g->cp == 2 ? 4 : 2;     /* two at once */
            fault = oracle_plan_fault(t.plan, t.lengths, t.n);
            harness_note("seed %d, turn %d: the oracle says %s", 94000 + i, turn, fault ? fault : "sound");
            CHECK((cf_plan_validate(t.plan, t.lengths, t.n, NULL, &t.error) == CF_OK) == (fault == NULL));
            damaged += fault != NULL;
            sound += fault == NULL;
            g->cp = other;
            *number = before;
        }
        drop(&t);
    }
    harness_report("%d damaged, %d still sound", damaged, sound);
}

/* Each number of a share is wrong in turn. */
TEST(broken_cp_groups_are_refused) {
    cp_groups t = {.lengths = {3000, 20, 30}, .n = 3, .pack = {.chunk_size = 100, .n_ranks = 4, .max_cp = 4}};
    cf_chain *g;
    cf_chunk *c;
    cf_slice *s;
    cf_error *e = &t.error;
    REQUIRE(pack(&t) && t.plan->chains[1].cp == 4 && t.plan->chains[1].n_chunks > 1);
    g = &t.plan->chains[1];
    g->cp = 3;
    refused(cf_plan_validate(t.plan, t.lengths, 3, NULL, e), e, CF_ERROR_PLAN, "chains.cp");
    g->cp = 8;
    refused(cf_plan_validate(t.plan, t.lengths, 3, NULL, e), e, CF_ERROR_PLAN, "chains.cp");
    g->cp = 2;
    refused(cf_plan_validate(t.plan, t.lengths, 3, NULL, e), e, CF_ERROR_PLAN, "chunks.cp");
    g->cp = 0;
    CHECK_INT(cf_plan_validate(t.plan, t.lengths, 3, NULL, e), CF_ERROR_PLAN);
    g->cp = 4;
    s = &t.plan->slices[t.plan->chunks[g->first_chunk].first_slice];
    s->begin++;
    CHECK_INT(cf_plan_validate(t.plan, t.lengths, 3, NULL, e), CF_ERROR_PLAN);
    s->begin--;
    g->tokens++;
    refused(cf_plan_validate(t.plan, t.lengths, 3, NULL, e), e, CF_ERROR_PLAN, "chains.tokens");
    g->tokens--;
    c = &t.plan->chunks[g->first_chunk]; /* first a row is left out though all sums agree; then the last row is */
    c->pairs = cf_slice_pairs(++s->begin, s->length);
    refused(cf_plan_validate(t.plan, t.lengths, 3, NULL, e), e, CF_ERROR_PLAN, "slices.begin");
    c->pairs = cf_slice_pairs(--s->begin, s->length);
    CHECK_INT(cf_plan_validate(t.plan, t.lengths, 3, NULL, e), CF_OK);
    t.lengths[0]++;
    t.plan->n_tokens++;
    refused(cf_plan_validate(t.plan, t.lengths, 3, NULL, e), e, CF_ERROR_PLAN, "chains.n_chunks");
    drop(&t);
}

/* A share is missing, belongs to a narrower cp group, or is in two chains. All other numbers agree. */
TEST(parts_that_are_not_there_are_refused) {
    cp_groups t = {.lengths = {150}, .n = 1, .pack = {.chunk_size = 100, .n_ranks = 2, .max_cp = 2}};
    cp_groups u = {.lengths = {1500}, .n = 1, .pack = {.chunk_size = 100, .n_ranks = 4, .max_cp = 4}};
    cf_chunk idle = {0}, *c;
    cf_chain chains[5], *g;
    cf_error *e = &t.error;
    REQUIRE(pack(&t) && t.plan->n_chains == 2 && t.plan->n_chunks == 2 && t.plan->n_slices == 2);
    idle.chain = idle.up = idle.down = -1;
    idle.first_slice = idle.rank = 1;
    t.plan->chunks[1] = idle;
    t.plan->n_slices = t.plan->n_chains = t.plan->n_idle = 1;
    t.plan->lower_bound = 0;
    refused(cf_plan_validate(t.plan, t.lengths, 1, NULL, e), e, CF_ERROR_PLAN, "chunks.chain");
    drop(&t);

    t.pack.n_ranks = 4;
    REQUIRE(pack(&t) && t.plan->n_chains == 2 && t.plan->chains[0].cp == 2 && t.plan->chains[0].first_chunk == 0);
    t.plan->chains[0].cp = t.plan->chunks[0].cp = 4;
    refused(cf_plan_validate(t.plan, t.lengths, 1, NULL, e), e, CF_ERROR_PLAN, "chains.cp");
    drop(&t);

    REQUIRE(pack(&u) && u.plan->n_chains == 4 && u.plan->chains[1].n_chunks > 1 && u.plan->chains[1].cp == 4);
    memcpy(chains, u.plan->chains, 4 * sizeof *chains);
    g = &chains[1];
    c = &u.plan->chunks[g->first_chunk];
    chains[4] = *g;
    chains[4].first_chunk = g->first_chunk + 1;
    chains[4].n_chunks = g->n_chunks - 1;
    chains[4].tokens -= c->state;
    g->n_chunks = 1;
    g->tokens = c->state;
    c->down = -1;
    c->below = 0;
    c[1].up = -1;
    for (c++; c < &u.plan->chunks[chains[4].first_chunk + chains[4].n_chunks]; c++) {
        c->chain = 4;
        c->index--;
        c->prefix -= g->tokens;
    }
    g = u.plan->chains;
    u.plan->chains = chains;
    u.plan->n_chains = 5;
    refused(cf_plan_validate(u.plan, u.lengths, 1, NULL, &u.error), &u.error, CF_ERROR_PLAN, "chains.n_chunks");
    u.plan->chains = g;
    drop(&u);
}

/* Two sequences of equal length, each with the other's share on the second rank. */
TEST(shares_of_two_cp_groups_are_no_cp_group) {
    cp_groups t =
        {.lengths = {400, 400}, .n = 2, .pack = {.chunk_size = 100, .n_ranks = 2, .max_cp = 2, .cost = {0, 1, 0}}};
    int64_t i, exchanged = 0;
    REQUIRE(pack(&t));
    for (i = 0; i < t.plan->n_chains; i++) {
        cf_chain *g = &t.plan->chains[i];
        int64_t chunk;
        if (g->cp != 2 || t.plan->chunks[g->first_chunk].rank != 1) continue;
        exchanged++;
        g->sequence = 1 - g->sequence;
        for (chunk = g->first_chunk; chunk < g->first_chunk + g->n_chunks; chunk++) {
            cf_slice *slice = &t.plan->slices[t.plan->chunks[chunk].first_slice];
            slice->sequence = slice->first = (int32_t)g->sequence;
        }
    }
    CHECK_INT(exchanged, 2);
    refused(cf_plan_validate(t.plan, t.lengths, 2, NULL, &t.error), &t.error, CF_ERROR_PLAN, "slices.first");
    drop(&t);
}

/* Two cp groups on the same ranks, in a different order on one of them. All passes are of the same kinds, but the
   groups wait for each other forever. */
TEST(cp_groups_that_do_not_meet_are_refused) {
    cp_groups t = {.lengths = {190, 190}, .n = 2, .pack = {.chunk_size = 50, .n_ranks = 2, .max_cp = 2}};
    cf_schedule *sound, *broken;
    int64_t i;
    t.pack.cost.per_token = 1;
    REQUIRE(pack(&t) && t.plan->n_chains == 4 && schedule(&t, NULL));
    CHECK_INT(cf_lockstep_validate(t.plan, all(&t), NULL, NULL, &t.error), CF_OK);
    sound = t.schedules[1];
    broken = naive_copy(sound);
    REQUIRE(sound->n_actions % 2 == 0);
    for (i = 0; i < sound->n_actions; i++)
        broken->actions[i] = sound->actions[(i + sound->n_actions / 2) % sound->n_actions];
    CHECK(t.plan->chunks[broken->actions[0].chunk].chain != t.plan->chunks[sound->actions[0].chunk].chain);
    t.schedules[1] = broken;
    CHECK_INT(cf_schedule_validate(t.plan, broken, NULL, NULL, NULL), CF_OK);
    CHECK_INT(cf_lockstep_validate(t.plan, all(&t), NULL, NULL, &t.error), CF_ERROR_SCHEDULE);
    CHECK_STR(t.error.field, "actions");
    t.schedules[1] = sound;
    naive_free(broken);
    drop(&t);
}

/* The JSON has the shares. A plan that nobody has validated, with a cp group beyond the ranks, does no harm. */
TEST(cp_groups_are_written_and_damaged_ones_survived) {
    cp_groups t = {.lengths = {300, 20, 30}, .n = 3, .pack = {.chunk_size = 16, .n_ranks = 4, .max_cp = 4}};
    harness_text json = {0};
    cf_timeline *timeline = NULL;
    int64_t i, slice;
    REQUIRE(pack(&t));
    REQUIRE(t.plan->n_chains > 1 && t.plan->chains[0].cp > 1);
    CHECK_INT(cf_write_plan_json(t.plan, NULL, harness_collect, &json, NULL), CF_OK);
    CHECK(strstr(json.at, t.plan->chains[0].cp == 4 ? "\"cp\": 4" : "\"cp\": 2") != NULL);
    free(json.at);
    REQUIRE(schedule(&t, NULL));
    CHECK_INT(cf_lockstep_validate(t.plan, all(&t), NULL, NULL, &t.error), CF_OK);
    /* the state of another rank of the cp group, on which the pass depends */
    slice = t.plan->chunks[3 * t.plan->chunks_per_rank].first_slice;
    t.plan->chunks[3 * t.plan->chunks_per_rank].first_slice = INT64_MAX / 2;
    refused(cf_simulate(t.plan, t.schedules[0], NULL, &timeline, &t.error), &t.error, CF_ERROR_PLAN,
            "chunks.first_slice");
    t.plan->chunks[3 * t.plan->chunks_per_rank].first_slice = slice;
    for (i = 0; i < t.plan->n_chains; i++) t.plan->chains[i].cp = 64;
    CHECK(cf_lockstep_validate(t.plan, all(&t), NULL, NULL, &t.error) != CF_OK);
    refused(cf_simulate(t.plan, t.schedules[0], NULL, &timeline, &t.error), &t.error, CF_ERROR_PLAN, "chains.cp");
    drop(&t);
}

/* Every allocation fails once. */
TEST(cp_groups_survive_without_memory) {
    cp_groups t = {.lengths = {300, 20, 30}, .n = 3, .pack = {.chunk_size = 16, .n_ranks = 4, .max_cp = 4}};
    int64_t fail_at;
    int made = 0;
    for (fail_at = 1; !made; fail_at++) {
        harness_heap heap = {0};
        cf_allocator allocator = {harness_alloc, harness_release, NULL};
        allocator.user = &heap;
        heap.fail_at = fail_at;
        t.pack.allocator = &allocator;
        made = pack(&t);
        CHECK(made || (t.error.code == CF_ERROR_MEMORY && t.plan == NULL));
        cf_plan_free(t.plan);
        CHECK(heap.live == 0 && heap.faults == 0);
    }
    CHECK(fail_at > 2);
}

SUITE(cp_groups, CASE(packing_cp_groups_needs_what_pack_size_says),
      CASE(cp_groups_even_out_giants), CASE(larger_bounds_of_cp_groups_are_never_worse),
      CASE(dear_transfers_make_cp_groups_narrow),
      CASE(chunks_of_cp_groups_see_the_rows_of_all_ranks), CASE(state_is_of_own_rows),
      CASE(memory_has_the_gathered_layer),
      CASE(widths_are_what_they_cost), CASE(cp_groups_stay_within_their_room),
      CASE(passes_of_cp_groups_take_as_long_as_the_slowest_rank), CASE(gathers_are_priced_by_model_and_gpu),
      CASE(scans_of_recurrent_layers_are_priced),
      CASE(cp_groups_that_cannot_be_are_named), CASE(random_damage_to_cp_groups_is_judged_as_by_the_oracle),
      CASE(broken_cp_groups_are_refused), CASE(parts_that_are_not_there_are_refused),
      CASE(shares_of_two_cp_groups_are_no_cp_group),
      CASE(cp_groups_are_written_and_damaged_ones_survived),
      CASE(cp_groups_that_do_not_meet_are_refused), CASE(cp_groups_survive_without_memory));
