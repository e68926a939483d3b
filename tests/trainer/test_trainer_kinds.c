/* test_trainer_kinds.c - kinds of layers in the CPU trainer of examples/, in float64 - MIT or public domain

       cc -std=c99 -O1 -g -fsanitize=address,undefined -DTRAIN_FLOAT64 tests/trainer/test_trainer_kinds.c \
           tests/implementation.c -lm

   Each kind's gradients are compared with those of whole sequences, for any K, packing and stream;
   test_trainer_whole.c has every kind once more, from its definition. */

#define _XOPEN_SOURCE 700

#ifndef TRAIN_FLOAT64
#define TRAIN_FLOAT64
#endif

#include "../../chunkflow.h"

#include "../../examples/chunked.h"
#include "../../examples/check.h"

#define HARNESS_IMPLEMENTATION
#include "../harness.h"

#include "world.h"

/* Each kind alone, and some together; those with sinks, gates, experts and the module are among them. */
static const char *const patterns[] = {"full+sinks+gate", "window+sinks,full", "chunked,full+gate", "latent",
                                       "full+experts", "delta", "kda", "mamba",
                                       "delta+experts,latent,window+sinks", "kda,chunked+experts,mamba"};
enum { PATTERNS = sizeof patterns / sizeof patterns[0] };

static model_config model_of_kinds(const char *pattern, int64_t layers, double mtp) {
    model_config c = tiny_model();
    c.hidden = 24; /* heads of 6, of which 2 are rotated by themselves in a latent layer */
    c.heads = 4;
    c.kv_heads = 2;
    c.ffn = 18;
    c.layers = layers;
    c.window = 11;
    c.kinds.experts = 5;
    c.kinds.active = 2;
    c.kinds.balance = 0.5;
    c.kinds.mtp = mtp;
    CHECK_STR(parse_pattern(&c.kinds, pattern), NULL);
    CHECK_STR(model_config_fault(&c), NULL);
    return c;
}

/* ================================================================================================================
   >>kinds
   ================================================================================================================ */

/* Trains on the same batch with K, a stream or none, and slices as a generator says. */
TEST(any_chunking_gives_the_same_gradients) {
    harness_rng rng = {34};
    double worst = 0;
    for (int trial = 0; trial < harness_rounds(12 * PATTERNS, PATTERNS); trial++) {
        const int64_t all = 1000000, ks[] = {1, 2, all}, chunk_size = trial % 7 == 0 ? 2 : harness_between(&rng, 1, 40);
        int64_t lengths[8];
        for (int i = 0; i < 8; i++) lengths[i] = harness_between(&rng, 0, i < 2 ? 90 : 25);
        lengths[0] += 2;
        world x;
        const char *pattern = patterns[trial % PATTERNS];
        model_config c = model_of_kinds(pattern, harness_between(&rng, 1, 4), trial % 2 == 0 ? 0.4 : 0);
        c.window = harness_between(&rng, 1, 50);
        c.dropout = harness_chance(&rng, 0.3) ? 0.2 : 0;
        c.untied = harness_chance(&rng, 0.5);
        world_begin(&x, &c, lengths, 8, chunk_size, ks[harness_between(&rng, 0, 2)], 0);
        cf_pack_desc *p = &x.runner.packing;
        p->align = chunk_size % 4 == 0 ? 4 : 1;
        p->split = (cf_split_method)harness_between(&rng, 0, 3);
        p->n_ranks = harness_chance(&rng, 0.3) ? 2 : 1;
        if (trial % 3 == 0) x.runner.stream_bytes = stream_ring_bytes(stream_width_of(&c), KEY_BLOCK);
        harness_note("trial %d: %s, %d layers, mtp %g, window %d, chunks of %d, K %d, align %d", trial,
                     pattern, (int)c.layers, c.kinds.mtp, (int)c.window, (int)chunk_size,
                     (int)x.runner.order.shape.k, (int)p->align);
        worst = fmax(worst, check_same_gradients(&x));
        for (int64_t layer = 0; layer < x.runner.routing.layers; layer++) { /* replays do not count */
            const layer_kind kind = layer_kind_of(&c, layer);
            double count = 0;
            for (int64_t j = 0; j < 8 * x.runner.routing.experts; j++) {
                count += x.runner.routing.count[experts_at(&x.runner.routing, layer, 0) + j];
            }
            CHECK_INT((int64_t)count, kind.experts ? 2 * x.batch.n_tokens : 0);
        }
        world_end(&x);
    }
    harness_note("%s", "");
    harness_report("at most %.1e off", worst);
}

/* Numbers of state that a group of 5 chunks and 70 tokens has in one layer: K, V and gradients, with a window of 11 of
   the last 10 rows of each chunk, with blocks of 11 of those from the last multiple of 11 on; latents, a rotated key,
   and gradients; 4 snapshots and a carry of heads x 6 x 6, and 3 rows of Q, K and V. */
TEST(states_have_the_size_of_their_kind) {
    static const struct {
        const char *kind;
        int64_t numbers;
    } cases[] = {{"full", 4 * 70 * 12}, {"window", 4 * (4 * 10 + 6) * 12}, {"chunked", 4 * (5 + 10 + 4 + 9 + 4) * 12},
                 {"latent", 2 * 70 * (12 + 2)},
                 {"delta", 5 * (4 * 36 + 3 * 72)}, {"mamba", 5 * (4 * 36 + 3 * 72)}};
    const int64_t length = 70;
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        world x;
        chunked_result result;
        const model_config c = model_of_kinds(cases[i].kind, 2, 0);
        world_begin(&x, &c, &length, 1, 16, 1, 0);
        chunked_loss(&x, &result);
        CHECK_INT(x.meter.peak[MEMORY_STATE], 2 * cases[i].numbers * (int64_t)sizeof(real));
        world_end(&x);
    }
}

/* Of 5 chunks, with K 1: F and R read a snapshot unless they begin the sequence, and F alone leaves one, unless it ends
   it. B reads a snapshot twice, for the filter's gradient wants its tail once more, and a carry, and leaves a carry. */
TEST(snapshots_travel_as_often_as_needed) {
    const int64_t length = 70, numbers = 4 * 36 + 3 * 72;
    world x;
    chunked_result result;
    const model_config c = model_of_kinds("delta", 2, 0);
    world_begin(&x, &c, &length, 1, 16, 1, 0);
    x.runner.stream_bytes = stream_ring_bytes(stream_width_of(&c), KEY_BLOCK);
    chunked_loss(&x, &result);
    CHECK_INT(result.n_replays, 4);
    CHECK_INT(x.runner.stream.in.bytes, 2 * (4 + 3 + 2 * 4 + 5) * numbers * (int64_t)sizeof(real));
    CHECK_INT(x.runner.stream.out.bytes, 2 * (4 + 5) * numbers * (int64_t)sizeof(real));
    world_end(&x);
}

/* ================================================================================================================
   >>refusals
   ================================================================================================================ */

TEST(what_no_chunk_could_have_is_refused) {
    static const char *const bad[][2] = {
        {"", "wanted full"}, {"ful", "wanted full"}, {"full,", "wanted full"}, {"full+", "wanted full"},
        {"sinks", "wanted full"}, {"full+sink", "wanted full"}, {"full,,full", "wanted full"},
        {"+sinks", "wanted full"},
        {"latent+sinks", "sinks and gate are for"}, {"delta+gate", "sinks and gate are for"},
        {"full,full,full,full,full,full,full,full,full,full,full,full,full,full,full,full,full", "at most 16"}};
    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++) {
        model_config c = model_of_kinds("full", 2, 0);
        const char *why = parse_pattern(&c.kinds, bad[i][0]);
        if (!why) why = model_config_fault(&c);
        if (!CHECK(why && strstr(why, bad[i][1]))) FAIL("\"%s\": %s", bad[i][0], why ? why : "accepted");
    }
    model_config c = model_of_kinds("experts,window+sinks+gate+experts", 3, 0), d;
    CHECK(c.kinds.n_pattern == 2 && c.kinds.pattern[0].mixer == MIXER_FULL && c.kinds.pattern[0].experts == 1);
    CHECK(c.kinds.pattern[1].mixer == MIXER_WINDOW && c.kinds.pattern[1].sinks && c.kinds.pattern[1].gate);
    static const struct {
        int what;
        const char *why;
    } cases[] = {{0, "balance-over batch: the loss multiplies counts by"}, {1, "balance-over call: what a call sees"},
                 {2, "capacity: which tokens an expert drops"}, {3, "experts must"}, {4, "active must"},
                 {5, "active must"}, {6, "window must be more"}, {7, "mtp and balance"},
                 {8, "hidden / 2 + the rotated"}};
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        d = c;
        if (i == 0 || i == 1) d.kinds.balance_over = 2 + (unsigned)i;
        if (i == 2) d.kinds.capacity = 1.25;
        if (i == 3) d.kinds.experts = 65;
        if (i == 4) d.kinds.active = 6;
        if (i == 5) d.kinds.active = 0;
        if (i == 6) d.window = 0;
        if (i == 7) d.kinds.balance = NAN;
        if (i == 8) d.hidden = 512, parse_pattern(&d.kinds, "latent");
        const char *why = model_config_fault(&d);
        if (!CHECK(why && strstr(why, cases[i].why))) FAIL("case %d: %s", (int)i, why ? why : "accepted");
    }
    d = model_of_kinds("full,latent+experts", 2, 0); /* what only experts need does not matter without them */
    d.kinds.active = d.kinds.experts = 0;
    CHECK(model_config_fault(&d) && strstr(model_config_fault(&d), "experts must"));
    CHECK(parse_pattern(&d.kinds, "full,latent") == NULL && model_config_fault(&d) == NULL);
    CHECK(layer_kind_of(&d, 1).mixer == MIXER_LATENT && layer_kind_of(&d, 2).mixer == MIXER_LATENT); /* the module's */
}

SUITE(trainer_kinds,
      CASE(any_chunking_gives_the_same_gradients), CASE(states_have_the_size_of_their_kind),
      CASE(snapshots_travel_as_often_as_needed), CASE(what_no_chunk_could_have_is_refused));

int main(int argc, char **argv) {
    static const harness_suite *const suites[] = {&suite_trainer_kinds};
    return harness_main(argc, argv, suites, 1);
}
