/* test_trainer_trees.c - sequences that share rows in the CPU trainer of examples/, in float64 - MIT or public domain

       cc -std=c99 -O1 -g -fsanitize=address,undefined -DTRAIN_FLOAT64 tests/trainer/test_trainer_trees.c \
           tests/implementation.c -lm

   Random forests are trained with their common rows computed once, and their gradients compared with those of whole
   sequences, each by itself. Then come faults that a trainer may well have: each must show. */

#define _XOPEN_SOURCE 700

#ifndef TRAIN_FLOAT64
#define TRAIN_FLOAT64
#endif

#include "../../chunkflow.h"

#include "../../examples/model.h"

/* What runs chunks calls these in the place of what they are named after: see >>controls. */
static double faulty_forward(const pass *p);
static void faulty_backward(const pass *p, const weights *gradient);
static void faulty_clear(const group_state *g, const model_config *c, const stage *s);

#define model_forward faulty_forward
#define model_backward faulty_backward
#define group_state_clear_gradient faulty_clear
#include "../../examples/chunked.h"
#undef model_forward
#undef model_backward
#undef group_state_clear_gradient

#include "../../examples/check.h"

#define HARNESS_IMPLEMENTATION
#include "../harness.h"

#include "world.h"

/* ================================================================================================================
   >>forests
   ================================================================================================================ */

/* A batch of documents some of which begin alike. with, shared: (n) document i begins with the first shared[i] tokens
   of document with[i]; NULL: drawn, among them documents that end within others. */
static void forest_begin(world *x, const model_config *c, const int64_t *lengths, const int64_t *with,
                         const int64_t *shared, int64_t n, int64_t chunk_size, int64_t k, harness_rng *rng) {
    world_begin(x, c, lengths, n, chunk_size, k, 0);
    for (int64_t i = 1; i < n; i++) {
        const int64_t other = with ? with[i] : harness_between(rng, 0, i - 1);
        const int64_t most = min_of(lengths[i], lengths[other]);
        const int64_t tokens = shared ? shared[i] : harness_chance(rng, 0.2) ? 0 : harness_between(rng, most / 2, most);
        make_alike(&x->documents, i, other, tokens);
    }
    x->runner.share = 1;
}

/* All kinds of layers that can share rows, in one model. */
static model_config model_of_all(int64_t window) {
    model_config c = tiny_model();
    c.hidden = 16;
    c.heads = 4;
    c.kv_heads = 2;
    c.ffn = 12;
    c.layers = 5;
    c.window = window;
    c.kinds.experts = 3;
    c.kinds.active = 2;
    CHECK_STR(parse_pattern(&c.kinds, "full+sinks+gate,window,latent,chunked+experts,full"), NULL);
    CHECK_STR(model_config_fault(&c), NULL);
    CHECK_STR(model_sharing_fault(&c), NULL);
    return c;
}

/* What the passes of all forests so far had to do with. */
static struct {
    int64_t middle;  /* a branch in the middle of a chunk: not all rows of its state's chunk are seen */
    int64_t depths;  /* leaves of different depth in one chunk */
    int64_t states;  /* a path that lies in more than one state */
    int64_t nested;  /* slices with two others above them in the chunk */
    int64_t hybrid;  /* sequences that have no path in a chunk with one */
    int64_t parting; /* more than one target */
    int64_t replays;
} seen;

static void look_at(const pass *p) {
    const group_state *state = NULL;
    int64_t rows_seeing = -1, own = 0, ends = 0;
    for (int64_t i = 0; i < p->n_places; i++) {
        const key_place *place = &p->places[i];
        const int64_t end = place->first + place->level.cu_seqlens_k[place->level.n_seqs];
        if (!place->state) own++;
        if (!place->state) continue;
        seen.states += state && place->state != state;
        seen.depths += rows_seeing >= 0 && place->level.cu_seqlens_q[1] < rows_seeing;
        state = place->state;
        rows_seeing = place->level.cu_seqlens_q[1];
        for (int64_t chunk = 0; chunk <= state->chunks; chunk++) ends += state->begin[chunk] == end;
        seen.middle += ends == 0 && (i + 1 == p->n_places || p->places[i + 1].state != state);
    }
    seen.nested += own > 1;
    CHECK(!state || state_stream_of(p) == state->stream);
    for (int64_t row = 1; row < p->rows->rows && state; row++) {
        seen.hybrid += p->rows->sequence[row] >= 0 && p->rows->position[row] == 0;
    }
    seen.parting += p->rows->n_more;
    seen.replays += p->is_replay;
}

/* Trains with K of 1, 2 and all, packings and weights of all kinds, a stream or none. */
TEST(forests_have_the_gradients_of_their_sequences) {
    harness_rng rng = {71};
    double worst = 0;
    memset(&seen, 0, sizeof seen);
    for (int trial = 0; trial < harness_rounds(200, 16); trial++) {
        const int64_t ks[] = {1, 2, 1000000}, n = harness_between(&rng, 2, 7);
        const int tiles = trial % 9 == 4; /* slices of more than one tile of rows */
        const int64_t long_one = tiles ? 180 : harness_between(&rng, 20, 70);
        const int64_t chunk_size = tiles ? 70 : trial % 9 == 0 ? 4 : harness_between(&rng, 8, 40);
        int64_t lengths[7];
        for (int i = 0; i < 7; i++) lengths[i] = harness_between(&rng, 0, harness_chance(&rng, 0.6) ? long_one : 20);
        world x;
        const model_config c = model_of_all(harness_between(&rng, 1, 60));
        forest_begin(&x, &c, lengths, NULL, NULL, n, chunk_size, ks[trial % 3], &rng);
        cf_pack_desc *p = &x.runner.packing;
        p->split = (cf_split_method)harness_between(&rng, 0, 3);
        p->n_ranks = harness_chance(&rng, 0.2) ? 2 : 1;
        x.batch.once = harness_chance(&rng, 0.4);
        if (!x.batch.once) p->align = chunk_size % 4 == 0 ? 4 : 1; /* shares tokens down to a multiple */
        if (!x.batch.once && harness_chance(&rng, 0.3)) x.runner.share = harness_between(&rng, 2, 30);
        for (int64_t i = 0; i < n && trial % 4 == 0; i++) { /* prompts that end anywhere, not all in the same place */
            const int64_t prompt = harness_between(&rng, 0, lengths[i]);
            memset((void *)x.batch.ignored[i], 1, (size_t)prompt);
            x.batch.n_targets -= max_of(0, lengths[i] - 1) - max_of(0, lengths[i] - max_of(1, prompt));
        }
        if (harness_chance(&rng, 0.4)) batch_draw_weights(&x.batch, (uint64_t)trial);
        if (trial % 3 == 0) x.runner.stream_bytes = stream_ring_bytes(stream_width_of(&c), KEY_BLOCK);
        harness_note("trial %d: %d sequences, window %d, chunks of %d, K %d, align %d, once %d", trial, (int)n,
                     (int)c.window, (int)chunk_size, (int)x.runner.order.shape.k, (int)p->align, x.batch.once);
        worst = fmax(worst, check_same_gradients(&x));
        world_end(&x);
    }
    harness_note("%s", "");
    CHECK(seen.middle > 0 && seen.depths > 0 && seen.states > 0 && seen.nested > 0);
    CHECK(seen.hybrid > 0 && seen.parting > 0 && seen.replays > 0);
    harness_report("at most %.1e off; %d branches in the middle of a chunk", worst, (int)seen.middle);
}

/* A row with several targets may be the first of a block of rows, or the last. */
TEST(sequences_part_at_the_edges_of_blocks) {
    for (int64_t shared = ROW_BLOCK - 1; shared <= ROW_BLOCK + 1; shared++) {
        const int64_t lengths[] = {50, 41, 45}, with[] = {0, 0, 0}, rows[] = {0, shared, shared};
        world x;
        const model_config c = tiny_model();
        forest_begin(&x, &c, lengths, with, rows, 3, 80, 1, NULL);
        check_same_gradients(&x);
        world_end(&x);
    }
}

/* What a slice sees of a block of a place: more than one slice may have keys there, and a block may begin anywhere. */
TEST(parts_of_a_place_are_found) {
    const int32_t cu_q[] = {0, 3, 3, 5, 9}, cu_k[] = {0, 4, 6, 10, 10}, position[] = {50, 51, 52, 7, 8, 9, 1, 2, 3, 4};
    const key_level level = {4, cu_q, cu_k};
    const struct {
        int64_t first_row, at, count;
        int own;
        key_range wanted;
    } cases[] = {{0, 2, 5, 0, {100, 102, 0}}, {3, 2, 5, 0, {104, 105, 4}}, {4, 2, 5, 0, {104, 105, 4}},
                 {5, 2, 5, 0, {0, 0, 0}},     {0, 6, 4, 0, {0, 0, 0}},     {3, 6, 4, 0, {100, 104, 0}},
                 {3, 0, 10, 1, {1, 5, 6}},    {0, 0, 10, 1, {50, 54, 0}}};
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        attention_problem p = {0};
        const attention_slice slice = {cases[i].first_row, 2, 200};
        key_block keys = {NULL, NULL, NULL, NULL, 100, cases[i].count, cases[i].own, &level, cases[i].at};
        p.position = position;
        const key_range range = key_range_of(&p, &keys, &slice);
        harness_note("case %d", (int)i);
        CHECK_INT(range.first, cases[i].wanted.first);
        CHECK_INT(range.end, cases[i].wanted.end);
        CHECK_INT(range.row, cases[i].wanted.row);
    }
    harness_note("%s", "");
}

/* A prompt of two chunks and a half, answers of different depth, answers that part again, one that ends within
   another, and others, of which two are a tree within a chunk. */
static const int64_t answers[] = {64, 58, 70, 57, 61, 80, 7, 45, 12, 20, 14};
static const int64_t answers_with[] = {0, 0, 0, 0, 0, 2, 0, 0, 0, 0, 8};
static const int64_t answers_shared[] = {0, 50, 50, 50, 50, 65, 0, 37, 0, 20, 6};
enum { ANSWERS = sizeof answers / sizeof answers[0] };

static void answers_begin(world *x, const model_config *c, int64_t k) {
    forest_begin(x, c, answers, answers_with, answers_shared, ANSWERS, 20, k, NULL);
}

TEST(rows_that_are_shared_are_computed_once) {
    world x;
    chunked_result result;
    const model_config c = model_of_all(30);
    answers_begin(&x, &c, 1);
    chunked_loss(&x, &result);
    int64_t rows = 0;
    for (int64_t i = 0; i < ANSWERS; i++) {
        for (int64_t t = 0; t < answers[i]; t++) {
            int64_t j = 0;
            while (j < i && !batch_is_shared(&x.batch, i, j, t)) j++;
            rows += j == i;
        }
    }
    CHECK_INT(result.n_rows, rows);
    CHECK(rows <= 160 && x.batch.n_tokens == 488); /* tokens may be the same by chance */
    world_end(&x);
}

/* ================================================================================================================
   >>controls    faults that must show
   ================================================================================================================ */

typedef enum tree_fault {
    FAULT_NONE,
    FAULT_SECOND,  /* a row has one target, though sequences part behind it */
    FAULT_KEPT,    /* gradients of a state are not cleared for a group that gets its slot */
    FAULT_CLEARED, /* and here for every child of the group */
    FAULT_SIBLING, /* rows see those of siblings before them in the chunk */
    FAULT_BEYOND,  /* who parts earlier sees the rest of the path */
    FAULT_LEVEL,   /* what lies in the chunk itself above a slice is not seen */
    TWO_PASSES     /* no fault: a backward as I and W */
} tree_fault;

static tree_fault fault;

/* A pass with the fault. `copy` is where what differs goes. */
typedef struct faulty_pass {
    pass pass;
    chunk_rows rows;
    key_place places[16];
    int32_t all[2];
} faulty_pass;

static void make_faulty(faulty_pass *f, const pass *p) {
    const key_level all = {1, f->all, NULL};
    memset(f, 0, sizeof *f);
    f->pass = *p;
    f->rows = *p->rows;
    f->pass.rows = &f->rows;
    f->all[1] = (int32_t)p->rows->rows;
    if (fault == FAULT_SECOND) f->rows.n_more = 0;
    if (fault == FAULT_SIBLING && p->n_places > 0) f->rows.n_seqs = 1, f->rows.cu_seqlens_q = f->all;
    if ((fault != FAULT_BEYOND && fault != FAULT_LEVEL) || !CHECK(p->n_places <= 16)) return;
    f->pass.places = f->places;
    f->pass.n_places = 0;
    for (int64_t i = 0; i < p->n_places; i++) {
        key_place *place = &f->places[f->pass.n_places];
        if (fault == FAULT_LEVEL && !p->places[i].state) continue;
        *place = p->places[i];
        f->pass.n_places++;
        if (fault == FAULT_LEVEL || !place->state) continue;
        place->level = all;
        place->level.cu_seqlens_k = p->places[i].level.cu_seqlens_k;
    }
}

static double faulty_forward(const pass *p) {
    faulty_pass f;
    look_at(p);
    make_faulty(&f, p);
    return model_forward(&f.pass);
}

static void faulty_backward(const pass *p, const weights *gradient) {
    faulty_pass f;
    make_faulty(&f, p);
    if (fault == TWO_PASSES) model_backward_input(&f.pass, gradient);
    if (fault == TWO_PASSES) f.pass.n_places = 0, model_backward_weights(&f.pass, gradient);
    else model_backward(&f.pass, gradient);
    for (int64_t i = 0; i < p->n_places && fault == FAULT_CLEARED; i++) {
        if (p->places[i].state) group_state_clear_gradient(p->places[i].state, p->config, &p->stage);
    }
}

static void faulty_clear(const group_state *g, const model_config *c, const stage *s) {
    if (fault != FAULT_KEPT) group_state_clear_gradient(g, c, s);
}

/* The largest difference that a fault makes. */
static double difference_by(tree_fault which, int64_t k) {
    world x;
    chunked_result result;
    model_config c = tiny_model();
    c.hidden = 8;
    c.ffn = 12;
    answers_begin(&x, &c, k);
    weights plain = weights_new(&c);
    plain_loss(&x, &plain);
    fault = which;
    chunked_loss(&x, &result);
    fault = FAULT_NONE;
    const double d = worst_difference(&x.gradient, &plain);
    weights_free(&plain);
    world_end(&x);
    return d;
}

TEST(faults_show) {
    static const char *const names[] = {"none", "one target", "not cleared", "cleared for each", "siblings",
                                        "beyond the branch", "a level left out"};
    double least = INFINITY;
    for (int which = FAULT_NONE; which <= FAULT_LEVEL; which++) {
        const double d = difference_by((tree_fault)which, 2);
        harness_note("%s: %.2g", names[which], d);
        if (which == FAULT_NONE) CHECK(is_rounding(d));
        else CHECK(d > 1e-3);
        if (which != FAULT_NONE) least = fmin(least, d);
    }
    harness_note("%s", "");
    harness_report("at least %.1e off", least);
}

TEST(backward_in_two_passes_is_backward_in_one) {
    for (int64_t k = 1; k <= 2; k++) CHECK(is_rounding(difference_by(TWO_PASSES, k)));
}

/* ================================================================================================================
   >>bits
   ================================================================================================================ */

/* Neither K nor a stream changes a bit; nor does asking for shares where there are none. */
TEST(k_and_streams_change_no_bit) {
    const int64_t apart[] = {50, 9, 30};
    for (int forest = 0; forest < 2; forest++) {
        real *first = NULL;
        for (int way = 0; way < 4; way++) {
            world x;
            chunked_result result;
            const model_config c = model_of_all(11);
            if (forest) answers_begin(&x, &c, way == 1 ? 99 : 1);
            else world_begin(&x, &c, apart, 3, 12, way == 1 ? 99 : 1, 0);
            if (way == 2) x.runner.stream_bytes = stream_ring_bytes(stream_width_of(&c), KEY_BLOCK);
            if (way == 3) x.runner.share = 1;
            chunked_loss(&x, &result);
            if (!first) {
                first = TAKE(real, x.gradient.count);
                memcpy(first, x.gradient.flat, (size_t)x.gradient.count * sizeof *first);
            }
            harness_note("forest %d, way %d", forest, way);
            CHECK(memcmp(first, x.gradient.flat, (size_t)x.gradient.count * sizeof *first) == 0);
            world_end(&x);
        }
        free(first);
    }
    harness_note("%s", "");
}

TEST(what_cannot_be_shared_is_refused) {
    static const struct {
        const char *pattern, *why;
        double dropout, mtp, balance;
    } cases[] = {{"full", "dropout", 0.1, 0, 0}, {"full", "mtp", 0, 0.1, 0}, {"full,mamba", "recurrent", 0, 0, 0},
                 {"full+experts", "balance", 0, 0, 0.1}, {"full", NULL, 0, 0, 0.1}};
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        model_config c = model_of_all(10);
        CHECK_STR(parse_pattern(&c.kinds, cases[i].pattern), NULL);
        c.dropout = cases[i].dropout;
        c.kinds.mtp = cases[i].mtp;
        c.kinds.balance = cases[i].balance;
        const char *why = model_sharing_fault(&c);
        CHECK(cases[i].why ? why && strstr(why, cases[i].why) : !why);
    }
}

SUITE(trainer_trees, CASE(forests_have_the_gradients_of_their_sequences), CASE(rows_that_are_shared_are_computed_once),
      CASE(sequences_part_at_the_edges_of_blocks),
      CASE(parts_of_a_place_are_found), CASE(faults_show), CASE(backward_in_two_passes_is_backward_in_one), CASE(k_and_streams_change_no_bit),
      CASE(what_cannot_be_shared_is_refused));

int main(int argc, char **argv) {
    static const harness_suite *const suites[] = {&suite_trainer_trees};
    return harness_main(argc, argv, suites, 1);
}
