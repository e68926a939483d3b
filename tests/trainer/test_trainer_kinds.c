/* test_trainer_kinds.c - kinds of layers in the CPU trainer of examples/, in float64 - MIT or public domain

       cc -std=c99 -O1 -g -fsanitize=address,undefined -DTRAIN_FLOAT64 tests/trainer/test_trainer_kinds.c \
           tests/implementation.c -lm

   Each kind's gradients are compared with those of whole sequences, for any K, packing and stream;
   test_trainer_whole.c has every kind once more, from its definition. Then come faults that a trainer may well have: each
   must show. */

#define _XOPEN_SOURCE 700

#ifndef TRAIN_FLOAT64
#define TRAIN_FLOAT64
#endif

#include "../../chunkflow.h"

#include "../../examples/model.h"

/* What runs chunks calls these in the place of model_forward and model_backward: see >>controls. */
static double faulty_forward(const pass *p);
static void faulty_backward(const pass *p, const weights *gradient);

#define model_forward faulty_forward
#define model_backward faulty_backward
#include "../../examples/chunked.h"
#undef model_forward
#undef model_backward

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

/* What K and a stream must not change, to the bit. */
TEST(k_and_streams_change_no_bit) {
    const int64_t lengths[] = {50, 9};
    for (int i = 0; i < PATTERNS; i++) {
        real *first = NULL;
        for (int way = 0; way < 3; way++) {
            world x;
            chunked_result result;
            const model_config c = model_of_kinds(patterns[i], 3, 0.4);
            world_begin(&x, &c, lengths, 2, 12, way == 1 ? 99 : 1, 0);
            if (way == 2) x.runner.stream_bytes = stream_ring_bytes(stream_width_of(&c), KEY_BLOCK);
            chunked_loss(&x, &result);
            CHECK_INT(result.n_replays > 0, way != 1);
            if (!first) {
                first = TAKE(real, x.gradient.count);
                memcpy(first, x.gradient.flat, (size_t)x.gradient.count * sizeof *first);
            }
            harness_note("%s, way %d", patterns[i], way);
            CHECK(memcmp(first, x.gradient.flat, (size_t)x.gradient.count * sizeof *first) == 0);
            world_end(&x);
        }
        free(first);
    }
    harness_note("%s", "");
}

/* Backward as I and W leaves the same bits as in one piece, and W leans on nothing that I has left in the scratch. */
TEST(backward_in_two_passes_is_backward_in_one) {
    enum { N = 23 };
    for (int i = 0; i < PATTERNS; i++) {
        const int64_t n = N;
        int32_t cu_seqlens[2] = {0, N}, position[N], sequence[N] = {0}, token[N], target[N], next[N], target2[N];
        double weight[N], weight2[N];
        world x;
        const model_config c = model_of_kinds(patterns[i], 3, 0.4);
        world_begin(&x, &c, &n, 1, 64, 1, 0);
        weights whole = weights_new(&c);
        plain_loss(&x, &whole);
        for (int t = 0; t < N; t++) {
            position[t] = t;
            token[t] = x.batch.tokens[0][t];
            target[t] = batch_target(&x.batch, 0, t);
            next[t] = batch_next(&x.batch, 0, t);
            target2[t] = batch_target2(&x.batch, 0, t);
            weight[t] = batch_loss_weight(&x.batch);
            weight2[t] = batch_loss_weight2(&x.batch, c.kinds.mtp);
        }
        const chunk_rows rows = {N,      1,     0,      0,    cu_seqlens, cu_seqlens, position, sequence,
                                 weight, token, target, next, target2,    weight2,    0,        0,
                                 0,      NULL,  NULL,   NULL};
        const stage all = stage_of(&c, 0, 1);
        activations kept = activations_new(&c, &all, N, 1, MEMORY_ACTIVATIONS, &x.meter);
        workspace scratch = workspace_new(&c, N, &x.meter);
        routing routes = routing_new(&c, 1, N, &n, 1);
        const pass p = {&c, &x.weights, &rows, &kept, NULL, &scratch, all, x.seed, 0, &routes, NULL, 0};
        model_forward(&p);
        model_backward_input(&p, &x.gradient);
        CHECK(largest_of(x.gradient.layers[1].wo, c.hidden * c.hidden) == 0);
        memset(scratch.flat, 0xff, (size_t)(scratch.head_transposed - scratch.flat) * sizeof(real));
        model_backward_weights(&p, &x.gradient);
        harness_note("%s", patterns[i]);
        CHECK(memcmp(x.gradient.flat, whole.flat, (size_t)whole.count * sizeof(real)) == 0);
        routing_free(&routes);
        workspace_free(&scratch, &x.meter);
        activations_free(&kept, &x.meter);
        weights_free(&whole);
        world_end(&x);
    }
    harness_note("%s", "");
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
   >>controls    faults that must show
   ================================================================================================================ */

typedef enum fault_of_kind {
    FAULT_NONE,
    FAULT_CARRY,     /* gradients of state do not reach earlier chunks */
    FAULT_SNAPSHOT,  /* replays and backwards begin from the border before the right one */
    FAULT_NEIGHBOUR, /* a packed sequence begins from what lies before it in the chunk */
    FAULT_BALANCE,   /* each chunk has a balance loss of its own */
    FAULT_COUNTS,    /* forwards that keep nothing do not count who goes to which expert */
    FAULT_DROPPED,   /* nor do they run the module's layer */
    FAULT_ROUTES,    /* a replay routes otherwise than the first forward did */
    FAULT_NEXT,      /* the next token is not known where it lies in the next chunk */
} fault_of_kind;

static fault_of_kind fault;

/* What the balance loss sees that knows of no other chunk. */
static routing chunk_alone(const pass *p, int64_t *length) {
    const routing *r = p->routing;
    routing own = routing_new(p->config, r->chunks, r->rows, r->length, r->sequences);
    memset(length, 0, (size_t)r->sequences * sizeof *length);
    for (int64_t row = 0; row < p->rows->rows; row++) length[max_of(0, p->rows->sequence[row])]++;
    memcpy(own.routes, r->routes, (size_t)(r->chunks * r->layers * r->rows * r->active) * sizeof *own.routes);
    for (int64_t layer = 0; layer < r->layers; layer++) {
        for (int64_t row = 0; row < p->rows->rows && layer_kind_of(p->config, layer).experts; row++) {
            for (int64_t j = 0; j < r->active; j++) {
                own.count[experts_at(r, layer, p->rows->sequence[row]) + routes_at(r, p->rows->chunk, layer, row)[j]]++;
            }
        }
    }
    own.length = length;
    return own;
}

static double faulty_forward(const pass *p) {
    chunk_rows rows = *p->rows;
    pass q = *p;
    routing blind = *p->routing;
    const int32_t one_sequence[2] = {0, (int32_t)rows.rows};
    const int is_dropped = !p->stage.has_head;
    q.rows = &rows;
    if (fault == FAULT_COUNTS && is_dropped) {
        blind.count = TAKE(double, blind.layers * blind.sequences * blind.experts);
        q.routing = &blind;
    }
    if (fault == FAULT_DROPPED && is_dropped) q.stage.has_mtp = 0;
    if (fault == FAULT_SNAPSHOT && p->is_replay && rows.index > 0) rows.index--;
    if (fault == FAULT_NEXT && p->state && rows.index + 1 < p->state->chunks) rows.next[rows.rows - 1] = -1;
    if (fault == FAULT_NEIGHBOUR) {
        rows.cu_seqlens_q = rows.cu_seqlens_k = one_sequence;
        rows.n_seqs = 1;
    }
    for (int64_t layer = 0; fault == FAULT_ROUTES && p->is_replay && layer < p->routing->layers; layer++) {
        int16_t *route = routes_at(p->routing, rows.chunk, layer, 0);
        for (int64_t i = 0; i < rows.rows * p->routing->active; i++) route[i] = (int16_t)((route[i] + 1) % 5);
    }
    const double loss = model_forward(&q);
    if (q.routing == &blind) free(blind.count);
    return loss;
}

static void faulty_backward(const pass *p, const weights *gradient) {
    chunk_rows rows = *p->rows;
    pass q = *p;
    const int32_t one_sequence[2] = {0, (int32_t)rows.rows};
    int64_t length[8];
    routing alone = {0};
    q.rows = &rows;
    if (fault == FAULT_CARRY && p->state) group_state_clear_gradient(p->state, p->config, &p->stage);
    if (fault == FAULT_SNAPSHOT && rows.index > 0) rows.index--;
    if (fault == FAULT_NEXT && p->state && rows.index + 1 < p->state->chunks) rows.next[rows.rows - 1] = -1;
    if (fault == FAULT_NEIGHBOUR) {
        rows.cu_seqlens_q = rows.cu_seqlens_k = one_sequence;
        rows.n_seqs = 1;
    }
    if (fault == FAULT_BALANCE) {
        alone = chunk_alone(p, length);
        q.routing = &alone;
    }
    model_backward(&q, gradient);
    if (fault == FAULT_BALANCE) routing_free(&alone);
}

/* The largest difference that a fault makes, and whether there is none without it. */
static double difference_by(fault_of_kind which, const char *pattern, int64_t k) {
    const int64_t lengths[] = {70, 5, 9, 4, 0, 20, 3, 13};
    double d[2];
    world x;
    chunked_result result;
    const model_config c = model_of_kinds(pattern, 2, which == FAULT_NEXT || which == FAULT_DROPPED ? 0.4 : 0);
    world_begin(&x, &c, lengths, 8, 16, k, 0);
    for (int64_t i = 0; i < x.weights.n_tensors && strcmp(pattern, "delta,delta") == 0; i++) { /* S forgets at once */
        const tensor *t = &x.weights.tensors[i];
        for (int64_t j = 0; tensor_ends_with(t, "a_log") && j < t->count; j++) x.weights.flat[t->offset + j] = 9;
    }
    weights plain = weights_new(&c);
    plain_loss(&x, &plain);
    for (int i = 0; i < 2; i++) {
        fault = i == 0 ? FAULT_NONE : which;
        weights_clear(&x.gradient);
        chunked_loss(&x, &result);
        d[i] = worst_difference(&x.gradient, &plain);
    }
    fault = FAULT_NONE;
    CHECK(is_rounding(d[0]));
    weights_free(&plain);
    world_end(&x);
    return d[1];
}

TEST(faults_show) {
    static const struct {
        fault_of_kind fault;
        const char *name, *pattern;
        int64_t k;
    } cases[] = {
        {FAULT_CARRY, "no carry backwards", "full", 2},         {FAULT_CARRY, "no carry backwards", "window", 2},
        {FAULT_CARRY, "no carry backwards", "chunked", 2},      {FAULT_CARRY, "no carry backwards", "latent", 2},
        {FAULT_CARRY, "no carry backwards", "delta", 2},        {FAULT_CARRY, "no carry backwards", "kda", 2},
        {FAULT_CARRY, "no carry backwards", "mamba", 2},        {FAULT_SNAPSHOT, "wrong border", "delta", 1},
        {FAULT_SNAPSHOT, "wrong border", "kda", 99},            {FAULT_SNAPSHOT, "wrong border", "mamba", 2},
        {FAULT_NEIGHBOUR, "the neighbour's state", "delta", 2}, {FAULT_NEIGHBOUR, "the neighbour's state", "mamba", 2},
        {FAULT_NEIGHBOUR, "its tail alone", "delta,delta", 2},  {FAULT_BALANCE, "balance by chunk", "full+experts", 2},
        {FAULT_COUNTS, "not counted", "full+experts", 2},       {FAULT_DROPPED, "not run", "full", 2},
        {FAULT_ROUTES, "other routes", "full+experts", 1},      {FAULT_NEXT, "no look beyond the border", "full", 2},
    };
    double least = INFINITY;
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        const double d = difference_by(cases[i].fault, cases[i].pattern, cases[i].k);
        harness_note("%s, %s: %.2g", cases[i].name, cases[i].pattern, d);
        CHECK(d > 1e-3);
        least = fmin(least, d);
    }
    harness_note("%s", "");
    harness_report("at least %.1e off", least);
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
      CASE(any_chunking_gives_the_same_gradients), CASE(k_and_streams_change_no_bit),
      CASE(backward_in_two_passes_is_backward_in_one), CASE(states_have_the_size_of_their_kind),
      CASE(snapshots_travel_as_often_as_needed), CASE(faults_show), CASE(what_no_chunk_could_have_is_refused));

int main(int argc, char **argv) {
    static const harness_suite *const suites[] = {&suite_trainer_kinds};
    return harness_main(argc, argv, suites, 1);
}
