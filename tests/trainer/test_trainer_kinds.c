/* test_trainer_kinds.c - kinds of layers and shared rows in the CPU trainer of examples/ - MIT or public domain

       cc -std=c99 -O1 -g -fsanitize=address,undefined -DTRAIN_FLOAT64 tests/trainer/test_trainer_kinds.c \
           tests/implementation.c -lm

   In float64. Each kind's gradients are compared with those of whole sequences, for any K, packing and stream. Then
   random forests, whose common rows are computed once, are compared with their sequences on their own. Replays attend,
   or take attention's outputs from their forwards. test_trainer_whole.c repeats everything from the definitions. */

#define _XOPEN_SOURCE 700

#ifndef TRAIN_FLOAT64
#define TRAIN_FLOAT64
#endif

#include "../../chunkflow.h"

#include "../../examples/state_stream.h"

/* Counts attention calls: this replaces attention_forward_begin, with which each call begins. */
static int64_t attention_calls;

static void counted_begin(const attention_problem *p, const attention_results *r, int64_t rows) {
    attention_calls++;
    attention_forward_begin(p, r, rows);
}

/* Loses one of the borders that recurrences pass on, or only its tail. Borders are recognised as copies of this many
   numbers. */
static struct {
    int64_t numbers, heads; /* size of a border, and of its part before the tail */
    int64_t left;           /* borders before the lost one */
    int only_tail;
} lost = {-1, 0, 0, 0};

static void losing_send(state_stream *s, real *host, const real *device, int64_t count) {
    if (count != lost.numbers || lost.left-- != 0) stream_send(s, host, device, count);
    else if (lost.only_tail) stream_send(s, host, device, lost.heads);
}

#define stream_send losing_send
#define LEAST_OUTPUT_WINDOW 20 /* so that some windows keep outputs and others do not */
#define attention_forward_begin counted_begin
#include "../../examples/model.h"
#undef attention_forward_begin
#undef stream_send

/* The chunk runner calls this instead of model_forward, to count cases of passes. */
static double watched_forward(const pass *p);

#define model_forward watched_forward
#include "../../examples/chunked.h"
#undef model_forward

#include "../../examples/check.h"

#define HARNESS_IMPLEMENTATION
#include "../harness.h"

#include "world.h"

/* Each kind alone, and some together, including sinks, gates, experts and the prediction module. */
static const char *const patterns[] = {"full+sinks+gate", "window+sinks,full", "chunked,full+gate", "latent",
                                       "full+experts", "delta", "kda", "mamba",
                                       "delta+experts,latent,window+sinks", "kda,chunked+experts,mamba"};
enum { PATTERNS = sizeof patterns / sizeof patterns[0] };

static model_config model_of_kinds(const char *pattern, int64_t layers, double mtp) {
    model_config c = tiny_model();
    c.hidden = 24; /* heads of 6; in a latent layer 2 separate numbers of each are rotated */
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

/* Trains on the same batch with random K and slices, with and without a stream. */
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

/* The numbers of state in one layer for a chain of 5 chunks and 70 tokens.

   - attention: K, V and their gradients
   - a window of 11: of the last 10 rows of each chunk
   - blocks of 11: of the rows from the last multiple of 11 on
   - latents: a latent, a rotated key, and gradients
   - recurrences: 4 snapshots and a carry of heads x 6 x 6, and 3 rows of Q, K and V */
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

/* A prompt of 4 chunks with 3 answers: a carry for the prompt, however long it is, and one for an answer of 3 chunks, of
   which one runs at a time. cf_memory_load.carries counts the same. */
TEST(chains_of_a_tree_have_a_carry_each) {
    static const struct {
        int64_t answer, snapshots, carries;
    } cases[] = {{16, 4, 1}, {40, 4 + 2, 2}};
    const model_config c = model_of_kinds("delta", 2, 0);
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        const int64_t length = 64 + cases[i].answer, lengths[] = {length, length - 1, length - 2};
        chunked_result result;
        world x;
        world_begin(&x, &c, lengths, 3, 16, 1, 0);
        x.runner.share = 1;
        for (int64_t j = 1; j < 3; j++) make_alike(&x.documents, j, 0, 64);
        chunked_loss(&x, &result);
        CHECK_INT(x.meter.peak[MEMORY_STATE],
                  2 * (cases[i].snapshots + cases[i].carries) * (4 * 36 + 3 * 72) * (int64_t)sizeof(real));
        world_end(&x);
    }
}

/* Five chunks with K 1. F and R read a snapshot unless they begin the sequence, and only F leaves one, unless it ends
   the sequence. B reads a snapshot twice, because the filter's gradient needs its tail again. It reads a carry unless
   it ends the sequence, and leaves one unless it begins it. */
TEST(snapshots_travel_as_often_as_needed) {
    const int64_t length = 70, numbers = 4 * 36 + 3 * 72;
    world x;
    chunked_result result;
    const model_config c = model_of_kinds("delta", 2, 0);
    world_begin(&x, &c, &length, 1, 16, 1, 0);
    x.runner.stream_bytes = stream_ring_bytes(stream_width_of(&c), KEY_BLOCK);
    chunked_loss(&x, &result);
    CHECK_INT(result.n_replays, 4);
    CHECK_INT(x.runner.stream.in.bytes, 2 * (4 + 3 + 2 * 4 + 4) * numbers * (int64_t)sizeof(real));
    CHECK_INT(x.runner.stream.out.bytes, 2 * (4 + 4) * numbers * (int64_t)sizeof(real));
    world_end(&x);
}

/* ================================================================================================================
   >>forests
   ================================================================================================================ */

/* Makes a batch of documents, some of which begin alike, including some that end within others. */
static void forest_begin(world *x, const model_config *c, const int64_t *lengths, int64_t n, int64_t chunk_size,
                         int64_t k, harness_rng *rng) {
    world_begin(x, c, lengths, n, chunk_size, k, 0);
    for (int64_t i = 1; i < n; i++) {
        const int64_t other = harness_between(rng, 0, i - 1), most = min_of(lengths[i], lengths[other]);
        const int64_t tokens = harness_chance(rng, 0.2) ? 0 : harness_between(rng, most / 2, most);
        make_alike(&x->documents, i, other, tokens);
    }
    x->runner.share = 1;
}

/* Returns a model with layers of all kinds: attention kinds only, or recurrent ones with some of those. */
static model_config model_of_all(int64_t window, int recurrent) {
    model_config c = tiny_model();
    c.hidden = 16;
    c.heads = 4;
    c.kv_heads = 2;
    c.ffn = 12;
    c.layers = 5;
    c.window = window;
    c.kinds.experts = 3;
    c.kinds.active = 2;
    CHECK_STR(parse_pattern(&c.kinds, recurrent ? "delta,window,kda+experts,full,mamba"
                                                : "full+sinks+gate,window,latent,chunked+experts,full"), NULL);
    CHECK_STR(model_config_fault(&c), NULL);
    CHECK_STR(model_sharing_fault(&c), NULL);
    return c;
}

/* Counts of the cases that the passes of all forests met. */
static struct {
    int64_t middle;  /* a branch in the middle of a chunk: a continuation sees only some of its state's rows */
    int64_t depths;  /* leaves of different depth in one chunk */
    int64_t states;  /* a path in more than one state */
    int64_t nested;  /* slices with two others above them in the chunk */
    int64_t hybrid;  /* sequences without a path, in a chunk with one */
    int64_t parting; /* more than one target */
    int64_t replays;
    int64_t tails;   /* slices shorter than a convolution's tail that others in the chunk continue */
    int64_t ways;    /* slices that begin from the same snapshot as another slice of the chunk */
} seen;

static void look_at(const pass *p) {
    const chain_state *state = NULL;
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
    for (const row_span *s = p->rows->spans; s < p->rows->spans + p->rows->n_spans; s++) {
        seen.tails += s->child >= 0 && s->end - s->first < CONV - 1;
        for (const row_span *t = p->rows->spans; t < s; t++) {
            seen.ways += s->above && s->above == t->above && s->enters == t->enters;
        }
    }
    seen.nested += own > 1;
    CHECK(!state || state_stream_of(p) == state->stream);
    for (int64_t row = 1; row < p->rows->rows && state; row++) {
        seen.hybrid += p->rows->sequence[row] >= 0 && p->rows->position[row] == 0;
    }
    seen.parting += p->rows->n_extra;
    seen.replays += p->is_replay;
}

/* Returns the numbers that a row of a dropped chunk keeps. again: layers that attend in its replay as well. */
static int64_t numbers_kept(const model_config *c, int64_t *again) {
    int64_t numbers = 0;
    *again = 0;
    for (int64_t layer = 0; layer < all_layers(c); layer++) {
        const mixer_kind mixer = layer_kind_of(c, layer).mixer;
        const int is_short = (mixer == MIXER_WINDOW || mixer == MIXER_CHUNKED) && c->window < LEAST_OUTPUT_WINDOW;
        if (mixer == MIXER_LATENT) numbers += c->heads * (latent_of(c) + rope_of(c) + 1);
        else if (mixer < MIXER_LATENT && !is_short) numbers += c->hidden + c->heads;
        *again += is_short;
    }
    return numbers;
}

typedef enum output_fault { RIGHT, WRONG_OUTPUT, WRONG_LOG_SUM } output_fault;

/* The current run: output slots in use, replays that took outputs, and deliberate faults. */
static struct {
    int64_t live, most, replays;
    int64_t forwards_left;       /* before the run is stopped; below 0: never */
    volatile sig_atomic_t stop;
    output_fault fault;
} watch;

/* Follows a dropped chunk. Its forward leaves outputs, perhaps with a wrong number in layer 0. Its replay does not
   attend in layers that keep outputs, and then releases them. */
static void watch_outputs(const pass *p, int64_t calls) {
    const layer_activations *first = &p->outputs->layers[0];
    const int64_t row = p->rows->rows / 2;
    int64_t again;
    numbers_kept(p->config, &again);
    if (p->is_replay) CHECK_INT(calls, again);
    watch.replays += p->is_replay;
    watch.live += p->is_replay ? -1 : 1;
    watch.most = max_of(watch.most, watch.live);
    if (p->is_replay) spoil(p->outputs->flat, p->outputs->bytes / (int64_t)sizeof(real));
    else if (watch.fault == WRONG_OUTPUT) first->mixed[row * p->config->hidden] += 1e-6;
    else if (watch.fault == WRONG_LOG_SUM) first->lse[row * p->config->heads] += 1e-6;
}

static double watched_forward(const pass *p) {
    const int64_t before = attention_calls;
    look_at(p);
    const double loss = model_forward(p);
    if (p->outputs) watch_outputs(p, attention_calls - before);
    watch.stop = watch.forwards_left-- == 0;
    return loss;
}

static void watch_begin(void) {
    memset(&watch, 0, sizeof watch);
    watch.forwards_left = -1;
}

/* Trains with K of 1, 2 and all, and packings and weights of all kinds, with and without a stream. */
TEST(forests_have_the_gradients_of_their_sequences) {
    harness_rng rng = {71};
    double worst = 0;
    memset(&seen, 0, sizeof seen);
    watch_begin();
    for (int trial = 0; trial < harness_rounds(200, 16); trial++) {
        const int64_t ks[] = {1, 2, 1000000}, n = harness_between(&rng, 2, 7);
        const int tiles = trial % 9 == 4; /* slices of more than one tile of rows */
        const int64_t long_one = tiles ? 180 : harness_between(&rng, 20, 70);
        const int64_t chunk_size = tiles ? 70 : trial % 9 == 0 ? 4 : harness_between(&rng, 8, 40);
        int64_t lengths[7];
        for (int i = 0; i < 7; i++) lengths[i] = harness_between(&rng, 0, harness_chance(&rng, 0.6) ? long_one : 20);
        world x;
        const model_config c = model_of_all(harness_between(&rng, 1, 60), trial % 5 < 3);
        forest_begin(&x, &c, lengths, n, chunk_size, ks[trial % 3], &rng);
        cf_pack_desc *p = &x.runner.packing;
        p->split = (cf_split_method)harness_between(&rng, 0, 3);
        p->n_ranks = harness_chance(&rng, 0.2) ? 2 : 1;
        x.runner.keep_outputs = trial % 2;
        x.batch.shared_mean = harness_chance(&rng, 0.4);
        if (!x.batch.shared_mean) p->align = chunk_size % 4 == 0 ? 4 : 1; /* tokens are shared down to a multiple */
        if (!x.batch.shared_mean && harness_chance(&rng, 0.3)) x.runner.share = harness_between(&rng, 2, 30);
        /* prompts of any length, which do not all end at the same place */
        for (int64_t i = 0; i < n && trial % 4 == 0; i++) {
            const int64_t prompt = harness_between(&rng, 0, lengths[i]);
            memset((void *)x.batch.ignored[i], 1, (size_t)prompt);
            x.batch.n_targets -= max_of(0, lengths[i] - 1) - max_of(0, lengths[i] - max_of(1, prompt));
        }
        if (harness_chance(&rng, 0.4)) batch_draw_weights(&x.batch, (uint64_t)trial);
        if (trial % 3 == 0) x.runner.stream_bytes = stream_ring_bytes(stream_width_of(&c), KEY_BLOCK);
        harness_note("trial %d: %d sequences, window %d, chunks of %d, K %d, align %d, once %d", trial, (int)n,
                     (int)c.window, (int)chunk_size, (int)x.runner.order.shape.k, (int)p->align, x.batch.shared_mean);
        worst = fmax(worst, check_same_gradients(&x));
        world_end(&x);
    }
    harness_note("%s", "");
    CHECK(seen.middle > 0 && seen.depths > 0 && seen.states > 0 && seen.nested > 0);
    CHECK(seen.tails > 0 && seen.ways > 0);
    CHECK(seen.hybrid > 0 && seen.parting > 0 && seen.replays > watch.replays && watch.replays > 0);
    harness_report("at most %.1e off; %d branches in the middle of a chunk", worst, (int)seen.middle);
}

/* Loses one border at a time: a snapshot where sequences diverge, or one branch's gradient. Each loss has an effect,
   and so has the loss of each tail. A snapshot that was never written is NaN. */
TEST(each_border_that_is_lost_is_seen) {
    const int64_t lengths[] = {21, 17, 15, 12};
    const model_config c = model_of_kinds("delta", 1, 0);
    weights plain = weights_new(&c);
    double wanted = 0;
    int64_t n = 0;
    for (int only_tail = 0; only_tail < 2; only_tail++) {
        for (int64_t border = 0;; border++) {
            world x;
            chunked_result result;
            world_begin(&x, &c, lengths, 4, 8, 2, 0);
            x.runner.share = 1;
            for (int64_t i = 1; i < 4; i++) make_alike(&x.documents, i, 0, 12 - i);
            lost.numbers = border_numbers(&c);
            lost.heads = heads_numbers(&c);
            lost.left = border;
            lost.only_tail = only_tail;
            const double loss = chunked_loss(&x, &result);
            const int was_lost = lost.left < 0;
            if (border + only_tail == 0) wanted = plain_loss(&x, &plain);
            double worst = relative_difference_of_losses(loss, wanted);
            for (int64_t i = 0; i < plain.n_tensors; i++) {
                const tensor *t = &plain.tensors[i];
                worst = fmax(worst, relative_difference(x.gradient.flat + t->offset, plain.flat + t->offset, t->count));
            }
            if (!CHECK(was_lost ? worst > 1e-6 : is_rounding(worst))) FAIL("border %d: %g", (int)border, worst);
            world_end(&x);
            n += was_lost;
            if (!was_lost) break;
        }
    }
    lost.numbers = -1;
    weights_free(&plain);
    CHECK(n >= 12);
    harness_report("%d borders", (int)n);
}

/* ================================================================================================================
   >>outputs    of dropped chunks: their replays do not attend
   ================================================================================================================ */

/* Trains with outputs kept, and again without: both give the same bits, and the gradients of whole sequences. */
static void check_outputs(world *x, world *plain, double *worst) {
    chunked_result with, without;
    int64_t again, numbers = numbers_kept(&x->config, &again);
    x->runner.keep_outputs = 1;
    watch_begin();
    chunked_loss(x, &with);
    CHECK_INT(watch.replays, with.n_replays);
    CHECK_INT(watch.most, x->runner.n_outputs);
    CHECK_INT(watch.live, 0);
    chunked_loss(plain, &without);
    CHECK(with.n_replays == without.n_replays && with.loss == without.loss);
    CHECK(memcmp(x->gradient.flat, plain->gradient.flat, (size_t)x->gradient.count * sizeof(real)) == 0);
    const int64_t bytes = watch.most * x->runner.packing.chunk_size * numbers * (int64_t)sizeof(real);
    const memory_kind kind = x->runner.stream_bytes > 0 ? MEMORY_HOST : MEMORY_ACTIVATIONS;
    CHECK_INT(x->meter.peak[kind], plain->meter.peak[kind] + bytes);
    CHECK_INT(with.peak_activation_bytes,
              without.peak_activation_bytes + (kind == MEMORY_ACTIVATIONS ? bytes : 0));
    CHECK_INT(plain->runner.n_outputs, 0);
    weights_clear(&x->gradient);
    *worst = fmax(*worst, check_same_gradients(x));
}

TEST(replays_that_take_outputs_do_not_attend) {
    harness_rng rng = {49};
    double worst = 0;
    for (int trial = 0; trial < harness_rounds(12 * PATTERNS, PATTERNS); trial++) {
        const int64_t lengths[] = {harness_between(&rng, 40, 90), harness_between(&rng, 2, 70), 9, 0, 4};
        const int64_t chunk_size = harness_between(&rng, 5, 24), windows[] = {19, 20, 27, 12};
        world x, plain;
        model_config c = model_of_kinds(patterns[trial % PATTERNS], 3, trial % 3 == 0 ? 0.4 : 0);
        c.window = windows[(trial + trial / PATTERNS) % 4];
        c.dropout = trial % 4 == 1 ? 0.2 : 0;
        world_begin(&x, &c, lengths, 5, chunk_size, 1 + trial / 2 % 2, 0);
        world_begin(&plain, &c, lengths, 5, chunk_size, 1 + trial / 2 % 2, 0);
        if (trial % 3 != 0) x.runner.stream_bytes = stream_ring_bytes(stream_width_of(&c), KEY_BLOCK);
        if (trial % 7 == 3 && trial % 5 != 2) x.runner.packing.n_ranks = 2;
        if (trial % 5 == 2) x.runner.order.kind = CF_SCHEDULE_GPIPE; /* gpipe may also drop chunks without a chain */
        x.runner.order.forwards_first = x.runner.packing.no_tails = trial % 5 == 2;
        plain.runner.order = x.runner.order;
        plain.runner.packing = x.runner.packing;
        plain.runner.stream_bytes = x.runner.stream_bytes;
        harness_note("trial %d: %s, window %d, chunks of %d", trial, patterns[trial % PATTERNS], (int)c.window,
                     (int)chunk_size);
        check_outputs(&x, &plain, &worst);
        world_end(&x);
        world_end(&plain);
    }
    harness_note("%s", "");
    harness_report("at most %.1e off", worst);
}

/* Makes one number of a layer's outputs wrong by 1e-6 in each dropped chunk. Gradients of weights are then off by more
   than rounding. */
TEST(wrong_outputs_are_found) {
    static const char *const kinds[] = {"full", "window+sinks", "chunked+gate", "latent"};
    const int64_t length = 60;
    for (int i = 0; i < 4; i++) {
        for (int fault = RIGHT; fault <= WRONG_LOG_SUM; fault++) {
            world x;
            model_config c = model_of_kinds(kinds[i], 2, 0);
            chunked_result result;
            c.window = 30;
            weights right = weights_new(&c);
            world_begin(&x, &c, &length, 1, 16, 1, 0);
            x.runner.keep_outputs = 1;
            watch_begin();
            watch.fault = (output_fault)fault;
            chunked_loss(&x, &result);
            plain_loss(&x, &right);
            const double off = worst_difference(&x.gradient, &right);
            harness_note("%s, fault %d: %g", kinds[i], fault, off);
            CHECK_INT(is_rounding(off), fault == RIGHT);
            weights_free(&right);
            world_end(&x);
        }
    }
    watch_begin();
    harness_note("%s", "");
}

/* Stops a run after each of its forwards. All memory is released, and a later batch is unaffected. */
TEST(a_run_that_stops_leaves_no_outputs) {
    const int64_t length = 90;
    const model_config c = model_of_kinds("full,latent", 2, 0);
    for (int stream = 0; stream < 2; stream++) {
        world x;
        chunked_result result;
        cf_error error;
        world_begin(&x, &c, &length, 1, 16, 1, 0);
        x.runner.keep_outputs = 1;
        x.runner.stop = &watch.stop;
        if (stream) x.runner.stream_bytes = stream_ring_bytes(stream_width_of(&c), KEY_BLOCK);
        for (int64_t forwards = 0; forwards < 11; forwards++) {
            watch_begin();
            watch.forwards_left = forwards;
            CHECK_INT(chunked_gradients(&x.runner, &x.weights, &x.gradient, &x.batch, x.seed, &result, &error),
                      CF_ERROR_CANCELLED);
        }
        watch_begin();
        weights_clear(&x.gradient);
        check_same_gradients(&x);
        CHECK_INT(watch.most, 5);
        CHECK_INT(x.runner.n_outputs, 5);
        world_end(&x);
    }
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
    d = model_of_kinds("full,latent+experts", 2, 0); /* requirements of experts do not apply without experts */
    d.kinds.active = d.kinds.experts = 0;
    CHECK(model_config_fault(&d) && strstr(model_config_fault(&d), "experts must"));
    CHECK(parse_pattern(&d.kinds, "full,latent") == NULL && model_config_fault(&d) == NULL);
    CHECK(layer_kind_of(&d, 1).mixer == MIXER_LATENT && layer_kind_of(&d, 2).mixer == MIXER_LATENT); /* the module's */
}

/* Ranks of a cp group are processes; this program runs all ranks in turn. */
TEST(cp_groups_are_refused_in_one_process) {
    const int64_t length = 90;
    const model_config c = model_of_kinds("delta", 1, 0);
    chunked_result result;
    cf_error error;
    world x;
    world_begin(&x, &c, &length, 1, 16, 1, 0);
    x.runner.packing.n_ranks = x.runner.packing.max_cp = 2;
    CHECK_INT(chunked_gradients(&x.runner, &x.weights, &x.gradient, &x.batch, x.seed, &result, &error),
              CF_ERROR_ARGUMENT);
    CHECK(strstr(error.text, "max_cp[0]") != NULL);
    world_end(&x);
}

TEST(what_cannot_be_shared_is_refused) {
    static const struct {
        const char *pattern, *why;
        double dropout, mtp, balance;
    } cases[] = {{"full", "dropout", 0.1, 0, 0}, {"full", "mtp", 0, 0.1, 0}, {"delta,kda,mamba", NULL, 0, 0, 0},
                 {"full+experts", "balance", 0, 0, 0.1}, {"full", NULL, 0, 0, 0.1}};
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        model_config c = model_of_all(10, 0);
        CHECK_STR(parse_pattern(&c.kinds, cases[i].pattern), NULL);
        c.dropout = cases[i].dropout;
        c.kinds.mtp = cases[i].mtp;
        c.kinds.balance = cases[i].balance;
        const char *why = model_sharing_fault(&c);
        CHECK(cases[i].why ? why && strstr(why, cases[i].why) : !why);
    }
}

SUITE(trainer_kinds, CASE(any_chunking_gives_the_same_gradients), CASE(states_have_the_size_of_their_kind),
      CASE(chains_of_a_tree_have_a_carry_each),
      CASE(snapshots_travel_as_often_as_needed), CASE(what_no_chunk_could_have_is_refused),
      CASE(cp_groups_are_refused_in_one_process));
SUITE(trainer_outputs, CASE(replays_that_take_outputs_do_not_attend), CASE(wrong_outputs_are_found),
      CASE(a_run_that_stops_leaves_no_outputs));
SUITE(trainer_trees, CASE(forests_have_the_gradients_of_their_sequences), CASE(each_border_that_is_lost_is_seen),
      CASE(what_cannot_be_shared_is_refused));

int main(int argc, char **argv) {
    static const harness_suite *const suites[] = {&suite_trainer_kinds, &suite_trainer_trees, &suite_trainer_outputs};
    return harness_main(argc, argv, suites, 3);
}
