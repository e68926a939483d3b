/* test_trainer_model.c - the memory model against what the CPU trainer of examples/ counts - MIT or public domain

       cc -std=c99 -O1 -g -fsanitize=address,undefined tests/trainer/test_trainer_model.c tests/implementation.c -lm

   The trainer takes every large buffer through a meter. Here it trains on a batch, and the meter's counts are compared
   with the library's figures for the same schedule. In float32 the terms are, with q = hidden:

     the model                                          the trainer, for each token
     8 h + .. (two bytes an element become four): 4 h   input, normed1, middle, normed2
     2 q + 2 kv                                         q, attended; k, v
     heads (row statistics, float)                      lse
     3 f                                                gate, up, gated
     2 h, vocabulary (float softmax)                    output and the final norm's result; probability
     8 bytes of token ids                               lie with the batch, and are not counted as activations
     nothing                                            2 scales a layer and a last one: 4 bytes each

   So the two differ by 8 - 4 (2 layers + 1) bytes a token, known beforehand. State is K, V and their gradients, all in
   float32: 4 kv numbers a token and layer. With a stream these are in host memory, and the device has the ring:
   state_window rows of one layer. Attention's outputs of dropped chunks have q numbers and one statistic a head, per
   token and layer, in both. */

#define _POSIX_C_SOURCE 200809L

#include "../../chunkflow.h"

#include "../../examples/check.h"
#include "../../examples/optimizer.h"

#define HARNESS_IMPLEMENTATION
#include "../harness.h"

#ifdef TRAIN_FLOAT64
#error "the terms above are for float32"
#endif

typedef struct shape {
    model_config config;
    int64_t chunk_size, k;
    int64_t lengths[6];
} shape;

/* Vocabulary, layers, hidden, heads, kv heads, ffn, untied; then dropout, theta, epsilon, window, kinds of layers. */
static const shape shapes[] = {
    {{VOCABULARY, 2, 32, 4, 2, 48, 0, 0, 1e4, 1e-6, 0, {0}}, 32, 1, {200, 7, 19, 3, 32, 1}},
    {{VOCABULARY, 3, 24, 2, 1, 64, 1, 0, 1e4, 1e-6, 0, {0}}, 16, 2, {100, 16, 5, 9, 2, 8}},
    {{VOCABULARY, 1, 48, 6, 6, 40, 0, 0, 1e4, 1e-6, 0, {0}}, 64, 3, {64, 250, 63, 1, 20, 30}},
    {{VOCABULARY, 4, 16, 2, 2, 24, 0, 0, 1e4, 1e-6, 0, {0}}, 24, 16, {97, 90, 11, 24, 23, 5}},
    {{VOCABULARY, 2, 32, 4, 4, 64, 1, 0, 1e4, 1e-6, 0, {0}}, 128, 1, {50, 60, 70, 20, 10, 5}},
};

#define N_SHAPES ((int)(sizeof shapes / sizeof shapes[0]))
#define N_LENGTHS 6

static cf_model model_of(const model_config *c) {
    cf_model m = {0};
    m.name = "trainer";
    m.layers = c->layers;
    m.hidden = c->hidden;
    m.heads = c->heads;
    m.kv_heads = c->kv_heads;
    m.ffn = c->ffn;
    m.vocab = c->vocabulary;
    m.tied = !c->untied;
    m.qkv_bias = 1;
    return m;
}

static cf_memory_desc sizing_of(const cf_model *model) {
    cf_memory_desc d = {0};
    d.model = model;
    d.activation_bytes = d.parameter_bytes = d.gradient_bytes = d.state_bytes = d.state_gradient_bytes = 4;
    d.optimizer_bytes = 8; /* two Adam moments; the parameters are their own master copy */
    d.loss = CF_LOSS_PARALLEL;
    d.fragmentation = -1;
    return d;
}

/* The meter's counts while a batch was trained on. */
typedef struct counted {
    chunked_result result;
    int64_t state, host, parameters;
} counted;

/* window: rows of a stream's ring; 0: no stream. outputs: 1 if dropped chunks keep attention's outputs. */
static counted train_batch(const shape *s, int64_t window, int outputs) {
    counted c = {0};
    documents d = {0};
    memory_meter meter = {0};
    chunk_runner runner = {0};
    cf_error error;
    batch b = batch_new(N_LENGTHS);
    weights w = weights_new(&s->config), gradient = weights_new(&s->config);
    for (int64_t i = 0; i < N_LENGTHS; i++) add_synthetic(&d, s->lengths[i], 5);
    for (int64_t i = 0; i < N_LENGTHS; i++) batch_put(&b, i, &d, i, 0, 0);
    weights_init(&w, &s->config, 11, 0.1);
    runner.config = &s->config;
    runner.stage = stage_of(&s->config, 0, 1);
    runner.packing.chunk_size = s->chunk_size;
    runner.order.shape.k = s->k;
    runner.stream_bytes = window * 4 * kv_width_of(&s->config) * (int64_t)sizeof(real);
    runner.keep_outputs = outputs;
    runner.meter = &meter;
    if (chunked_gradients(&runner, &w, &gradient, &b, 3, &c.result, &error) != CF_OK) FAIL("%s", error.text);
    c.state = meter.peak[MEMORY_STATE];
    c.host = meter.peak[MEMORY_HOST];
    c.parameters = w.count;
    chunk_runner_free(&runner);
    weights_free(&w);
    weights_free(&gradient);
    batch_free(&b);
    documents_free(&d);
    return c;
}

/* Returns the load of the one stage for the same batch, from the simulated timeline. A slot of the trainer has room for
   a full chunk, so kept chunks count ChunkSize tokens each. */
static cf_memory_load simulate_batch(const shape *s) {
    cf_pack_desc pack = {0};
    cf_schedule_desc order = {0};
    cf_simulate_desc simulate = {0};
    cf_plan *plan = NULL;
    cf_schedule *schedule = NULL;
    cf_timeline *timeline = NULL;
    cf_error error;
    cf_memory_load load = {0};
    pack.chunk_size = s->chunk_size;
    order.kind = CF_SCHEDULE_PAPER;
    order.shape.replay = CF_REPLAY_PIPELINE;
    order.shape.k = s->k;
    simulate.limits.per_token.state_gradient = 1; /* so that peak_bytes is the tokens with a state gradient */
    if (cf_pack(s->lengths, N_LENGTHS, &pack, &plan, &error) == CF_OK &&
        cf_schedule_make(plan, &order, &schedule, &error) == CF_OK &&
        cf_simulate(plan, schedule, &simulate, &timeline, &error) == CF_OK) {
        load.live_tokens = timeline->peak_live[0] * s->chunk_size;
        load.state_tokens = timeline->peak_state_tokens[0];
        load.state_gradient_tokens = timeline->peak_bytes[0];
    } else {
        FAIL("%s", error.text);
    }
    cf_timeline_free(timeline);
    cf_schedule_free(schedule);
    cf_plan_free(plan);
    return load;
}

static double off(int64_t predicted, int64_t count) {
    return count == 0 ? (double)predicted : (double)predicted / (double)count - 1;
}

TEST(activations_and_state) {
    double worst = 0;
    int i, chains = 0;
    for (i = 0; i < N_SHAPES; i++) {
        const shape *s = &shapes[i];
        cf_model model = model_of(&s->config);
        cf_memory_desc sizing = sizing_of(&model);
        cf_memory_load load = simulate_batch(s);
        cf_memory_report report;
        counted c = train_batch(s, 0, 0);
        int64_t unmodelled = 4 * (2 * s->config.layers + 1) - 8;
        double error;
        harness_note("shape %d", i);
        REQUIRE(cf_memory_estimate(&sizing, &load, 1, &report, 1, NULL) == CF_OK);
        error = off(report.activations, c.result.peak_activation_bytes);
        CHECK(error > -0.02 && error < 0.02);
        if (error * error > worst * worst) worst = error;
        /* and the whole difference is as in the table above */
        CHECK_INT(report.activations + unmodelled * load.live_tokens, c.result.peak_activation_bytes);
        CHECK_INT(report.state + report.state_gradient, c.state);
        chains += c.state > 0;
        CHECK_INT(report.parameters, 4 * c.parameters);
        CHECK_INT(report.gradients, 4 * c.parameters);
        CHECK_INT(report.optimizer, 8 * c.parameters);
    }
    CHECK(chains >= 3);
    harness_report("activations: at most %+.2f %% off; state, parameters and optimizer exact", 100 * worst);
}

/* K changes activations as the model predicts, but not state. */
TEST(k_moves_only_activations) {
    shape s = shapes[0];
    counted one, three;
    cf_memory_load a, b;
    s.k = 1;
    one = train_batch(&s, 0, 0);
    a = simulate_batch(&s);
    s.k = 3;
    three = train_batch(&s, 0, 0);
    b = simulate_batch(&s);
    CHECK_INT(three.result.peak_activation_bytes, 3 * one.result.peak_activation_bytes);
    CHECK_INT(b.live_tokens, 3 * a.live_tokens);
    CHECK_INT(three.state, one.state);
    CHECK_INT(b.state_tokens, a.state_tokens);
}

/* The ring and the host's bytes equal the model's to the byte, for a model of at least 6 layers. A longer sequence
   changes only the host's bytes. */
TEST(streamed_state) {
    int i, chains = 0;
    for (i = 0; i < N_SHAPES; i++) {
        shape s = shapes[i];
        cf_model model;
        cf_memory_desc sizing;
        cf_memory_load load;
        cf_memory_report report;
        counted c, longer;
        s.config.layers += 5;
        model = model_of(&s.config);
        sizing = sizing_of(&model);
        sizing.state_window = 2 * KEY_BLOCK * (1 + i % 3);
        load = simulate_batch(&s);
        harness_note("shape %d", i);
        REQUIRE(cf_memory_estimate(&sizing, &load, 1, &report, 1, NULL) == CF_OK);
        c = train_batch(&s, sizing.state_window, 0);
        CHECK_INT(report.state + report.state_gradient, c.state);
        CHECK_INT(report.host, c.host);
        CHECK_INT(c.host > 0, c.state > 0);
        if (c.host == 0) continue;
        chains++;
        s.lengths[i == 2 || i == 4] += 111;
        longer = train_batch(&s, sizing.state_window, 0);
        CHECK_INT(longer.state, c.state);
        CHECK(longer.host > c.host);
    }
    CHECK(chains >= 3);
}

/* A chain drops all chunks except the last K, and its first replay comes after all its forwards. Their outputs are on
   the device or, with a stream, in host memory, in addition to everything else. */
TEST(kept_outputs) {
    int i, window, dropping = 0;
    for (i = 0; i < N_SHAPES; i++) {
        for (window = 0; window <= 2 * KEY_BLOCK; window += 2 * KEY_BLOCK) {
            const shape *s = &shapes[i];
            cf_model model = model_of(&s->config);
            cf_memory_desc sizing = sizing_of(&model);
            cf_memory_load load = {0};
            cf_memory_report report;
            counted with = train_batch(s, window, 1), without = train_batch(s, window, 0);
            sizing.outputs = 1;
            load.input_tokens = max_of(0, with.result.longest_chain - s->k) * s->chunk_size;
            harness_note("shape %d, window %d", i, window);
            REQUIRE(cf_memory_estimate(&sizing, &load, 1, &report, 1, NULL) == CF_OK);
            report.inputs -= load.input_tokens * 4 * s->config.hidden; /* the inputs are tokens of the batch */
            CHECK_INT(with.result.peak_activation_bytes,
                      without.result.peak_activation_bytes + (window == 0 ? report.inputs : 0));
            CHECK_INT(with.host, without.host + (window == 0 ? 0 : report.inputs));
            dropping += report.inputs > 0;
        }
    }
    CHECK(dropping >= 6);
}

SUITE(trainer_model, CASE(activations_and_state), CASE(k_moves_only_activations), CASE(streamed_state),
      CASE(kept_outputs));

int main(int argc, char **argv) {
    static const harness_suite *const suites[] = {&suite_trainer_model};
    return harness_main(argc, argv, suites, sizeof suites / sizeof suites[0]);
}
