/* test_trainer_trees.c - sequences that share rows in the CPU trainer of examples/, in float64 - MIT or public domain

       cc -std=c99 -O1 -g -fsanitize=address,undefined -DTRAIN_FLOAT64 tests/trainer/test_trainer_trees.c \
           tests/implementation.c -lm

   Random forests are trained with their common rows computed once, and their gradients compared with those of whole
   sequences, each by itself. */

#define _XOPEN_SOURCE 700

#ifndef TRAIN_FLOAT64
#define TRAIN_FLOAT64
#endif

#include "../../chunkflow.h"

#include "../../examples/model.h"

/* What runs chunks calls this in the place of model_forward, to see what the passes have to do with. */
static double watched_forward(const pass *p);

#define model_forward watched_forward
#include "../../examples/chunked.h"
#undef model_forward

#include "../../examples/check.h"

#define HARNESS_IMPLEMENTATION
#include "../harness.h"

#include "world.h"

/* ================================================================================================================
   >>forests
   ================================================================================================================ */

/* A batch of documents some of which begin alike, among them such that end within others. */
static void forest_begin(world *x, const model_config *c, const int64_t *lengths, int64_t n, int64_t chunk_size, int64_t k,
                         harness_rng *rng) {
    world_begin(x, c, lengths, n, chunk_size, k, 0);
    for (int64_t i = 1; i < n; i++) {
        const int64_t other = harness_between(rng, 0, i - 1), most = min_of(lengths[i], lengths[other]);
        const int64_t tokens = harness_chance(rng, 0.2) ? 0 : harness_between(rng, most / 2, most);
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

static double watched_forward(const pass *p) {
    look_at(p);
    return model_forward(p);
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
        forest_begin(&x, &c, lengths, n, chunk_size, ks[trial % 3], &rng);
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

/* ================================================================================================================
   >>refusals
   ================================================================================================================ */

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

SUITE(trainer_trees, CASE(forests_have_the_gradients_of_their_sequences),
      CASE(what_cannot_be_shared_is_refused));

int main(int argc, char **argv) {
    static const harness_suite *const suites[] = {&suite_trainer_trees};
    return harness_main(argc, argv, suites, 1);
}
