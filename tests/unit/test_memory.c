/* >>memory: bytes of a stage against published formulas and measurements. */

#include "chunkflow.h"
#include "../harness.h"
#include "tools/chunkflow_tune.h"

#include <math.h>
#include <string.h>

#define GIB 1073741824.0

/* Heads, widths and switches of every kind in the table. */
static const char *const models[] = {"qwen2.5-0.5b", "qwen2.5-1.5b", "qwen2.5-3b",   "qwen2.5-7b",  "qwen2.5-14b",
                                     "qwen2.5-32b",  "qwen2.5-72b",  "qwen3-0.6b",   "qwen3-1.7b",  "qwen3-4b",
                                     "qwen3-8b",     "qwen3-14b",    "qwen3-32b",    "llama-3-8b",  "llama-3-70b",
                                     "llama-3.1-405b", "llama-3.2-1b", "llama-3.2-3b"};

static cf_memory_desc sizing(const char *model, int64_t tp, int64_t pp) {
    cf_memory_desc desc = {0};
    desc.model = cf_model_find(model);
    desc.parallel.tp = tp;
    desc.parallel.pp = pp;
    return desc;
}

static cf_memory_load load_of(int64_t live, int64_t chunk, int64_t state, int64_t state_gradient) {
    cf_memory_load load = {0};
    load.live_tokens = live;
    load.chunk_tokens = chunk;
    load.state_tokens = state;
    load.state_gradient_tokens = state_gradient;
    return load;
}

/* Returns the report of one stage; no failure is expected. */
static cf_memory_report report_of(const cf_memory_desc *desc, const cf_memory_load *load) {
    cf_memory_report report = {0};
    cf_error error;
    if (cf_memory_estimate(desc, load, 1, &report, 1, &error) != CF_OK) FAIL("%s", error.text);
    return report;
}

static double total_gib(const cf_memory_desc *desc, const cf_memory_load *load) {
    return (double)report_of(desc, load).total / GIB;
}

/* ---- kinds of layers ---- */

/* State worked out by hand from published shapes: bytes a token of rows that grow, and bytes at a border of chunks of
   8K. A border has snapshots, rows of windows, and tails. */
static const struct {
    const char *name;
    int64_t rows, border, tails;
} states[] = {
    {"qwen3-30b-a3b", 48 * 2 * 4 * 128 * 2, 0, 0},
    {"qwen3-next-80b-a3b", 12 * 2 * 2 * 256 * 2, 36 * 32 * 128 * 128 * 4, 36 * 3 * (2 * 16 * 128 + 32 * 128) * 2},
    {"qwen3.5-35b-a3b", 10 * 2 * 2 * 256 * 2, 30 * 32 * 128 * 128 * 4, 30 * 3 * (2 * 16 * 128 + 32 * 128) * 2},
    {"qwen3.5-27b", 16 * 2 * 4 * 256 * 2, 48 * 48 * 128 * 128 * 4, 48 * 3 * (2 * 16 * 128 + 48 * 128) * 2},
    {"gpt-oss-120b", 18 * 2 * 8 * 64 * 2, 0, 18 * 127 * 2 * 8 * 64 * 2},
    {"deepseek-v3", 61 * (512 + 64) * 2, 0, 0},
    {"glm-4.5", 92 * 2 * 8 * 128 * 2, 0, 0},
    {"kimi-linear-48b-a3b", 7 * (512 + 64) * 2, 20 * 32 * 128 * 128 * 4, 20 * 3 * 3 * 32 * 128 * 2},
    {"llama-4-scout", 12 * 2 * 8 * 128 * 2, 0, 0}, /* 8K divides 8K */
    {"llama-4-maverick", 12 * 2 * 8 * 128 * 2, 0, 0},
    {"nemotron-3-nano-30b-a3b", 6 * 2 * 2 * 128 * 2, 23 * 64 * 64 * 128 * 4, 23 * 3 * (64 * 64 + 2 * 8 * 128) * 2},
};

TEST(state_of_kinds_by_hand) {
    cf_parallel whole = {0};
    cf_shard shard;
    int64_t i;
    for (i = 0; i < COUNT(states); i++) {
        cf_memory_desc desc = {0};
        cf_token_bytes bytes, longer;
        int64_t share;
        harness_note("%s", states[i].name);
        desc.model = cf_model_find(states[i].name);
        REQUIRE(desc.model != NULL);
        desc.chunk_size = 8192;
        REQUIRE(cf_memory_token_bytes(&desc, 0, &bytes, NULL) == CF_OK);
        share = (bytes.border + 8191) / 8192;
        CHECK_INT(bytes.state_gradient, 2 * states[i].rows); /* fp32, and only for rows */
        CHECK_INT(bytes.border, states[i].border + states[i].tails);
        CHECK_INT(bytes.carry, states[i].border + 2 * states[i].tails); /* fp32, like all snapshots */
        CHECK_INT(bytes.state, states[i].rows + share + bytes.routes);
        desc.chunk_size = 16384; /* chunks twice as long have half as many borders, which are no larger */
        REQUIRE(cf_memory_token_bytes(&desc, 0, &longer, NULL) == CF_OK);
        CHECK_INT(longer.border, bytes.border);
        CHECK_INT(longer.carry, bytes.carry);
        CHECK(longer.state <= bytes.state);
    }
    REQUIRE(cf_stage_shard(cf_model_find("deepseek-v3"), &whole, 0, 0, &shard, NULL) == CF_OK);
    CHECK_INT(shard.elements, 2 * 128 * (192 + 128) + 1536 + 512 + 64); /* Q, K, V, output; both latents, rotated K */
}

/* Windows stop growing. A window as long as the sequence holds as much as full attention, and a short one almost
   nothing. */
TEST(windows_stop_growing) {
    cf_model model = *cf_model_find("qwen3-8b");
    cf_layer kind = {0};
    cf_memory_desc desc = {0};
    cf_memory_load load = load_of(8192, 8192, 262144, 262144);
    cf_memory_report full, wide, narrow;
    desc.model = &model;
    desc.chunk_size = 8192;
    full = report_of(&desc, &load);
    model.kinds = &kind;
    model.n_kinds = 1;
    CHECK_INT(report_of(&desc, &load).total, full.total); /* a kind without members of its own is the model's */
    kind.mixer = CF_MIXER_WINDOW;
    kind.window = 8193;
    wide = report_of(&desc, &load);
    CHECK_INT(wide.state, full.state);                               /* every row is in a window before some border */
    CHECK_INT(wide.state_gradient, 8192LL * 36 * 2 * 8 * 128 * 4);   /* and one border is in its backward */
    kind.window = 129;
    narrow = report_of(&desc, &load);
    CHECK_INT(narrow.state, full.state * 128 / 8192);
    CHECK_INT(narrow.state_gradient, 128LL * 36 * 2 * 8 * 128 * 4);
    load.carries = 3;
    CHECK_INT(report_of(&desc, &load).state_gradient, 3 * narrow.state_gradient);
    load.carries = load.state_gradient_tokens = 0;
    CHECK_INT(report_of(&desc, &load).state_gradient, 0);
    /* the rows since the last multiple of 16K: every second border hands on 8K of them */
    kind.mixer = CF_MIXER_CHUNKED;
    kind.window = 16384;
    load.state_gradient_tokens = 1;
    CHECK_INT(report_of(&desc, &load).state, full.state);
    kind.window = 4096;
    CHECK_INT(report_of(&desc, &load).state, 0);
}

/* Experts lie whole on ep GPUs. ZeRO divides them over their tp x dp / ep copies. */
TEST(experts_are_divided) {
    cf_memory_desc desc = {0};
    cf_memory_load load = load_of(1000, 1000, 0, 0);
    cf_parameters whole;
    cf_memory_report report;
    int64_t others, held, zero, ep;
    desc.model = cf_model_find("qwen3-30b-a3b");
    REQUIRE(cf_model_parameters(desc.model, &whole, NULL) == CF_OK);
    CHECK_INT(whole.experts, 48LL * 128 * 3 * 2048 * 768);
    others = whole.total - whole.experts;
    desc.parallel.dp = 32;
    for (ep = 1; ep <= 32; ep *= 4)
        for (zero = 0; zero <= 3; zero++) {
            int64_t copies = ep > 1 ? 32 / ep : 32;
            held = whole.experts / ep;
            harness_note("ep %d zero %d", (int)ep, (int)zero);
            desc.parallel.ep = ep == 1 ? 0 : ep;
            desc.parallel.zero = zero;
            report = report_of(&desc, &load);
            CHECK_INT(report.parameters, zero >= 3 ? others * 2 / 32 + held * 2 / copies : 2 * (others + held));
            CHECK_INT(report.gradients, zero >= 2 ? others * 4 / 32 + held * 4 / copies : 4 * (others + held));
            CHECK_INT(report.optimizer, zero >= 1 ? others * 12 / 32 + held * 12 / copies : 12 * (others + held));
        }
    desc.parallel.ep = desc.parallel.zero = 0; /* with tp, each part of an expert lies on the dp GPUs of its tp rank */
    desc.parallel.tp = 2;
    held = report_of(&desc, &load).optimizer;
    desc.parallel.zero = 1;
    report = report_of(&desc, &load);
    CHECK(report.optimizer >= held / 32 && report.optimizer <= held / 32 + 2);
}

/* 8-bit moments; one moment for matrices; adapters alone. */
TEST(optimizers_by_hand) {
    cf_memory_desc desc = {0};
    cf_memory_load load = load_of(1000, 1000, 0, 0);
    cf_parameters whole;
    cf_memory_report report, trained;
    int64_t adapters = 16 * 36 * (4 * 4096 + 2 * 4096 + 2 * 1024 + 3 * (4096 + 12288));
    desc.model = cf_model_find("qwen3-8b");
    REQUIRE(cf_model_parameters(desc.model, &whole, NULL) == CF_OK);
    desc.optimizer_bytes = 6;
    CHECK_INT(report_of(&desc, &load).optimizer, 6 * whole.total);
    desc.optimizer_bytes = 0;
    desc.matrix_bytes = 8;
    CHECK_INT(report_of(&desc, &load).optimizer, 12 * whole.total - 4 * (whole.attention + whole.mlp));
    desc.matrix_bytes = 0;
    report = report_of(&desc, &load);
    desc.lora_rank = 16; /* A and B of q, k, v, o, gate, up and down */
    trained = report_of(&desc, &load);
    CHECK_INT(trained.parameters, report.parameters + 2 * adapters);
    CHECK_INT(trained.gradients, 4 * adapters);
    CHECK_INT(trained.optimizer, 12 * adapters);
    CHECK_INT(trained.activations, report.activations);
    desc.parallel.dp = 8;
    desc.parallel.zero = 1;
    CHECK_INT(report_of(&desc, &load).optimizer, 12 * adapters / 8);
    desc.model = cf_model_find("qwen3-30b-a3b");
    desc.parallel.ep = 4; /* 32 of 128 experts on each of four ranks; the other four hold copies */
    trained = report_of(&desc, &load);
    /* for q, k, v and o alone: there is no MLP besides the experts */
    adapters = (int64_t)16 * 48 * (4 * 2048 + 2 * 4096 + 2 * 512);
    CHECK_INT(trained.gradients, 4 * adapters);
    desc.lora_experts = 1;
    adapters = (int64_t)16 * 48 * 32 * 3 * (2048 + 768);
    CHECK_INT(report_of(&desc, &load).parameters, trained.parameters + 2 * adapters);
    CHECK_INT(report_of(&desc, &load).gradients, trained.gradients + 4 * adapters);
    CHECK_INT(report_of(&desc, &load).optimizer, trained.optimizer + 12 * adapters / 2);
}

/* Each row has eight copies, and three results of 768 for each. The fullest GPU has a quarter more. */
TEST(rows_of_experts_by_hand) {
    cf_memory_desc desc = {0};
    cf_token_bytes dense, experts, uneven;
    cf_model plain = *cf_model_find("qwen3-30b-a3b");
    int64_t rows = 8 * (2 * 2048 + 3 * 2 * 768);
    plain.kinds = NULL;
    plain.n_kinds = 0;
    plain.ffn = 768;
    desc.model = &plain;
    REQUIRE(cf_memory_token_bytes(&desc, 0, &dense, NULL) == CF_OK);
    desc.model = cf_model_find("qwen3-30b-a3b");
    desc.parallel.dp = 8;
    desc.parallel.ep = 8;
    REQUIRE(cf_memory_token_bytes(&desc, 0, &experts, NULL) == CF_OK);
    CHECK_INT(experts.activations - dense.activations, 48 * (rows + 8 * 128 - 3 * 2 * 768));
    CHECK_INT(experts.routes, 48 * 8 * 2);
    CHECK_INT(experts.buffers - dense.buffers, 8 * 2 * 2 * 2048);
    desc.parallel.imbalance = 25;
    REQUIRE(cf_memory_token_bytes(&desc, 0, &uneven, NULL) == CF_OK);
    CHECK_INT(uneven.activations - experts.activations, 48 * rows / 4);
    desc.parallel.recompute = CF_RECOMPUTE_MLP;
    REQUIRE(cf_memory_token_bytes(&desc, 0, &uneven, NULL) == CF_OK);
    CHECK_INT(experts.activations - uneven.activations, 48 * (rows + 8 * 128 + 2 * 2 * 2048));
    desc.parallel.recompute = CF_RECOMPUTE_NONE;
    desc.parallel.imbalance = 0;
    desc.parallel.tp = 4; /* with sequence parallelism a GPU sends a quarter of the rows, each to a whole expert */
    REQUIRE(cf_memory_token_bytes(&desc, 0, &uneven, NULL) == CF_OK);
    CHECK_INT(uneven.routes, 48 * 4);
}

/* Bytes that are not whole are rounded up: a border over its chunk's rows, and the expert rows of the fullest GPU.
   These have 11 bytes on average, for any percentage of imbalance. */
TEST(odd_bytes_are_rounded_up) {
    static const cf_layer kind = {.experts = 2, .active = 1, .ffn = 1};
    cf_memory_desc desc = {0};
    cf_token_bytes bytes, most;
    cf_model model = *cf_model_find("qwen3-next-80b-a3b");
    int64_t i, border;
    desc.model = &model;
    desc.chunk_size = CF_MAX_CHUNK_SIZE;
    REQUIRE(cf_memory_token_bytes(&desc, 0, &most, NULL) == CF_OK);
    border = most.border;
    for (i = -1; i <= 1; i++) {
        desc.chunk_size = border + i;
        REQUIRE(cf_memory_token_bytes(&desc, 0, &bytes, NULL) == CF_OK);
        CHECK_INT(bytes.border, border);
        CHECK_INT(bytes.state - most.state, i < 0);
    }
    model = *cf_model_find("qwen3-8b");
    model.hidden = model.heads = model.kv_heads = 8;
    model.head_dim = model.layers = model.n_kinds = 1;
    model.kinds = &kind;
    desc.activation_bytes = 1;
    desc.parallel.dp = desc.parallel.ep = 2;
    REQUIRE(cf_memory_token_bytes(&desc, 0, &most, NULL) == CF_OK);
    for (i = 0; i <= 200; i++) {
        desc.parallel.imbalance = i;
        REQUIRE(cf_memory_token_bytes(&desc, 0, &bytes, NULL) == CF_OK);
        CHECK_INT(bytes.activations - most.activations, (11 * (100 + i) + 99) / 100 - 11);
    }
}

/* A stage whose layers are all of one kind takes as much as in a model that has only this kind. */
TEST(kinds_of_other_stages_cost_nothing) {
    static const cf_layer kinds[] = {{.window = 0},
                                     {.mixer = CF_MIXER_WINDOW, .window = 64, .heads = 64, .ffn = 1 << 15},
                                     {.heads = 128, .kv_heads = 64, .experts = 8, .active = 4, .ffn = 1 << 15}};
    cf_memory_load loads[2];
    int64_t other, what;
    loads[0] = loads[1] = load_of(2048, 1024, 8192, 1024);
    loads[0].live_scores = loads[0].chunk_scores = 4096;
    for (other = 1; other < 3; other++)
        for (what = 0; what < CF_RECOMPUTE_COUNT; what++) {
            cf_model alone = *cf_model_find("qwen3-8b"), both = alone;
            cf_memory_desc desc = {0};
            cf_memory_report one[2], two[2];
            const cf_layer pair[] = {kinds[0], kinds[other]};
            alone.kinds = both.kinds = pair;
            alone.n_kinds = 1;
            both.n_kinds = 2;
            both.pattern = "aaaaaaaaaaaaaaaaaabbbbbbbbbbbbbbbbbb";
            desc.model = &alone;
            desc.parallel.pp = 2;
            desc.parallel.recompute = (cf_recompute)what;
            desc.unfused_attention = 1;
            desc.state_window = 512;
            REQUIRE(cf_memory_estimate(&desc, loads, 2, one, 2, NULL) == CF_OK);
            desc.model = &both;
            REQUIRE(cf_memory_estimate(&desc, loads, 2, two, 2, NULL) == CF_OK);
            CHECK(memcmp(&one[0], &two[0], sizeof one[0]) == 0);
            CHECK(one[1].total < two[1].total);
        }
}

/* ---- activations ---- */

/* Worked out by hand from the models' shapes: activation bytes per token and layer of a middle stage, 8 h + 4 q + 4 kv
   + 6 f, with fused attention but without its row statistics; and K and V of all layers, 4 kv L. */
static const struct {
    const char *name;
    int64_t a_layer, state;
} by_hand[] = {
    {"qwen2.5-0.5b", 40448, 12288},    {"qwen2.5-1.5b", 73216, 28672},  {"qwen2.5-3b", 91648, 36864},
    {"qwen2.5-7b", 158720, 57344},     {"qwen2.5-14b", 148480, 196608}, {"qwen2.5-32b", 231424, 262144},
    {"qwen2.5-72b", 279808, 327680},   {"llama-3-8b", 139264, 131072},  {"llama-3-70b", 274432, 327680},
    {"qwen3-8b", 126976, 147456},      {"qwen3-32b", 231424, 262144},
};

TEST(bytes_per_token_by_hand) {
    int64_t i, s;
    for (i = 0; i < COUNT(by_hand); i++) {
        cf_memory_desc desc = sizing(by_hand[i].name, 1, 3);
        cf_token_bytes bytes;
        cf_shard shard;
        int64_t state = 0;
        harness_note("%s", by_hand[i].name);
        desc.parallel.recompute = CF_RECOMPUTE_SELECTIVE;
        for (s = 0; s < 3; s++) {
            REQUIRE(cf_memory_token_bytes(&desc, s, &bytes, NULL) == CF_OK);
            state += bytes.state;
        }
        CHECK_INT(state, by_hand[i].state);
        REQUIRE(cf_memory_token_bytes(&desc, 1, &bytes, NULL) == CF_OK);
        REQUIRE(cf_stage_shard(desc.model, &desc.parallel, 1, -1, &shard, NULL) == CF_OK);
        CHECK_INT(bytes.activations, shard.layers * by_hand[i].a_layer);
        CHECK_INT(bytes.state_gradient, 2 * bytes.state); /* float by default */
        CHECK_INT(bytes.boundary, 2 * desc.model->hidden);
        CHECK_INT(bytes.logits, 0);
        desc.parallel.recompute = CF_RECOMPUTE_NONE;
        REQUIRE(cf_memory_token_bytes(&desc, 1, &bytes, NULL) == CF_OK);
        CHECK_INT(bytes.activations, shard.layers * (by_hand[i].a_layer + 4 * desc.model->heads));
        desc.parallel.recompute = CF_RECOMPUTE_FULL;
        REQUIRE(cf_memory_token_bytes(&desc, 1, &bytes, NULL) == CF_OK);
        CHECK_INT(bytes.activations, shard.layers * 2 * desc.model->hidden);
    }
}

/* Table 2 of Korthikanti et al. (2022), bytes per token and layer without the scores, for Megatron's GPT layer: MHA, no
   gate, two dropout masks. q = kv = h there. */
static double korthikanti(double h, double f, double t, int sequence) {
    return sequence ? h * (18 + 4 * f / h) / t : 10 * h + (8 * h + 4 * f) / t;
}

/* On such a layer our bytes are the paper's less the masks. Then come the terms that the formula lacks: a gate adds 2
   f, grouped heads subtract 4 (q - kv) for narrower K and V, and heads whose total is not the hidden size add 4 (q - h)
   twice. */
TEST(korthikanti_table_2) {
    int64_t i, t;
    int sequence;
    for (i = 0; i < COUNT(models); i++) {
        cf_model plain = *cf_model_find(models[i]);
        for (t = 1; t <= 4; t *= 2) {
            for (sequence = 0; sequence <= 1; sequence++) {
                cf_memory_desc desc = sizing("qwen2.5-7b", t, 3);
                double h = (double)plain.hidden, f = (double)plain.ffn, tp = (double)t, masks, theirs;
                cf_token_bytes bytes;
                cf_shard shard;
                cf_error error;
                desc.model = &plain;
                desc.parallel.no_sequence = !sequence;
                desc.parallel.recompute = CF_RECOMPUTE_SELECTIVE;
                theirs = korthikanti(h, f, tp, sequence);
                masks = sequence ? 2 * h / tp : 2 * h;
                plain = *cf_model_find(models[i]);
                if (plain.heads % t != 0 || plain.kv_heads % t != 0) continue;
                harness_note("%s tp %d sequence %d", plain.name, (int)t, sequence);
                if (cf_memory_token_bytes(&desc, 1, &bytes, &error) != CF_OK) FAIL("%s", error.text);
                REQUIRE(cf_stage_shard(&plain, &desc.parallel, 1, -1, &shard, NULL) == CF_OK);
                {
                    double q = (double)(plain.heads * plain.head_dim), kv = (double)(plain.kv_heads * plain.head_dim);
                    double terms = theirs - masks + 2 * f / tp - 4 * (q - kv) / tp + 8 * (q - h) / tp;
                    CHECK(fabs((double)bytes.activations / (double)shard.layers - terms) < 1e-6);
                }
                plain.no_gate = 1; /* now the layer of the paper: only the masks differ */
                plain.kv_heads = plain.heads;
                plain.head_dim = 0;
                if (plain.hidden % plain.heads != 0) continue;
                REQUIRE(cf_memory_token_bytes(&desc, 1, &bytes, NULL) == CF_OK);
                CHECK(fabs((double)bytes.activations / (double)shard.layers - (theirs - masks)) < 1e-6);
            }
        }
    }
}

/* Megatron-LM's theoretical_memory_usage.py, compute_activation_memory (sequence parallelism, selective), one
   micro-batch of s tokens without a pipeline, in bytes. Written from its formula. */
static double megatron_activations(const cf_model *m, double s, double t) {
    double h = (double)m->hidden, bytes = s * h * (18 + 4 * (double)m->ffn / h) * (double)m->layers;
    bytes += 8 * s + s * h;                           /* token ids; dropout of the embedding */
    bytes += s * h * 4 * (1 + (double)m->vocab / h);  /* inputs of head and loss */
    return bytes / t;
}

TEST(megatron_activation_formula) {
    int64_t i, t;
    for (i = 0; i < COUNT(models); i++) {
        const cf_model *m = cf_model_find(models[i]);
        for (t = 1; t <= 4; t *= 2) {
            cf_memory_desc desc = sizing(m->name, t, 1);
            cf_memory_load load = load_of(4096, 4096, 0, 0);
            double s = 4096, tp = (double)t, h = (double)m->hidden, q = (double)(m->heads * m->head_dim), ours, terms;
            desc.parallel.recompute = CF_RECOMPUTE_SELECTIVE;
            desc.loss = CF_LOSS_PARALLEL;
            if (m->heads % t != 0 || m->kv_heads % t != 0) continue;
            ours = (double)report_of(&desc, &load).activations;
            terms = s * (double)m->layers / tp *
                    (2 * (double)m->ffn - 2 * h - 4 * (q - (double)(m->kv_heads * m->head_dim)) + 8 * (q - h));
            terms -= s * h / tp;           /* no dropout of the embedding */
            terms += 8 * s - 8 * s / tp;   /* token ids are not divided */
            harness_note("%s tp %d", m->name, (int)t);
            CHECK(fabs(ours - (megatron_activations(m, s, tp) + terms)) < 1);
        }
    }
}

TEST(unfused_operations_keep_more) {
    cf_memory_desc desc = sizing("qwen2.5-7b", 4, 1);
    cf_memory_load load = load_of(1000, 1000, 0, 0);
    int64_t fused = report_of(&desc, &load).activations, separate;
    desc.unfused = 1;
    CHECK_INT(report_of(&desc, &load).activations - fused, 1000 * 28 * (8 * 3584 + 2 * 18944) / 4);
    desc.unfused = 0;
    desc.unfused_attention = 1;
    load.live_scores = 1000 * 33000;
    load.chunk_scores = 1000 * 33000;
    separate = report_of(&desc, &load).activations;
    CHECK_INT(separate - fused, load.live_scores * 2 * 7 * 28 - 1000 * 28 * 4 * 7);
    desc.parallel.recompute = CF_RECOMPUTE_SELECTIVE;
    CHECK_INT(report_of(&desc, &load).activations, fused - 1000 * 28 * 4 * 7);
    CHECK(report_of(&desc, &load).working >= load.chunk_scores * 4 * 7);
}

/* Only attention layers have scores: 12 of 48 layers, each with 16 heads where the others have 32. */
TEST(scores_are_those_of_attention_layers) {
    cf_memory_desc desc = sizing("qwen3-next-80b-a3b", 1, 1);
    cf_memory_load load = load_of(1000, 1000, 0, 0);
    cf_memory_report without, with;
    desc.unfused_attention = 1;
    load.live_scores = load.chunk_scores = 1000000000;
    without = report_of(&desc, &load);
    load.live_scores = load.chunk_scores = 2000000000;
    with = report_of(&desc, &load);
    CHECK_INT(with.activations - without.activations, 1000000000LL * 2 * 12 * 16);
    CHECK_INT(with.working - without.working, 1000000000LL * 2 * 16);
}

/* One layer's row in backward, element by element: the residual, a norm's output, and the larger of the MLP (three
   matrices) and attention (Q, output; K, V). */
TEST(working_rows_by_hand) {
    cf_memory_desc desc = sizing("qwen2.5-7b", 1, 2);
    const cf_memory_load one = load_of(1000, 1000, 0, 0), two = load_of(1000, 2000, 0, 0);
    cf_memory_report reports[2][2];
    cf_memory_load loads[2];
    const int64_t mlp = 3 * 18944, residual = 2 * 3584;
    int i;
    for (i = 0; i < 2; i++) {
        loads[0] = loads[1] = i ? two : one;
        REQUIRE(cf_memory_estimate(&desc, loads, 2, reports[i], 2, NULL) == CF_OK);
        CHECK(!reports[i][0].at_loss);
    }
    CHECK_INT(reports[1][0].working - reports[0][0].working, 1000 * 2 * (mlp + residual));
}

/* Backward recomputes all activations of one layer at a time, including the row statistics of its attention. By hand,
   as in the table above. */
TEST(full_recompute_makes_all_of_a_layer) {
    cf_memory_desc desc = sizing("qwen2.5-7b", 1, 1);
    cf_token_bytes kept, made_again;
    REQUIRE(cf_memory_token_bytes(&desc, 0, &kept, NULL) == CF_OK);
    desc.parallel.recompute = CF_RECOMPUTE_FULL;
    REQUIRE(cf_memory_token_bytes(&desc, 0, &made_again, NULL) == CF_OK);
    CHECK_INT(made_again.working - kept.working, 158720 + 4 * 28);
}

/* Modules that are recomputed keep less. In the layer of Korthikanti et al. (4 h of MLP, no gate; bytes by their
   section 4.1) this drops the inputs of the two linear maps behind the norms, 2 h each; the input of the MLP's second,
   8 h; and that of its activation, 8 h. With a gate it drops 2 f of the product and 4 f of gate and up. Backward
   recomputes one layer's share at a time, and layers without recomputation keep all. */
TEST(modules_made_again) {
    static const cf_recompute whats[] = {CF_RECOMPUTE_LAYERNORM, CF_RECOMPUTE_ACT, CF_RECOMPUTE_MLP};
    cf_model gpt = {0};
    int64_t i, gate, tp, layers;
    gpt.layers = 12;
    gpt.hidden = 768;
    gpt.heads = gpt.kv_heads = 12;
    gpt.ffn = 4 * 768;
    gpt.vocab = 50304;
    for (gate = 0; gate <= 1; gate++)
        for (tp = 1; tp <= 4; tp *= 2)
            for (i = 0; i < COUNT(whats); i++) {
                const int64_t h = 768, f = 4 * h, without[] = {4 * h, 4 * h + 8 * h, 4 * h + 16 * h};
                const int64_t gated[] = {4 * h, 4 * h + 2 * f, 4 * h + 6 * f};
                int64_t dropped = (gate ? gated[i] : without[i]) / tp;
                cf_memory_desc desc = sizing("qwen2.5-7b", tp, 3);
                cf_token_bytes kept, again;
                gpt.no_gate = !gate;
                desc.model = &gpt;
                REQUIRE(cf_memory_token_bytes(&desc, 1, &kept, NULL) == CF_OK);
                desc.parallel.recompute = whats[i];
                REQUIRE(cf_memory_token_bytes(&desc, 1, &again, NULL) == CF_OK);
                CHECK_INT(kept.activations - again.activations, 4 * dropped);
                CHECK_INT(again.working - kept.working, dropped);
                for (layers = 1; layers <= 5; layers++) {
                    desc.parallel.recompute_layers = layers;
                    REQUIRE(cf_memory_token_bytes(&desc, 1, &again, NULL) == CF_OK);
                    CHECK_INT(kept.activations - again.activations, (layers < 4 ? layers : 4) * dropped);
                }
            }
}

/* Recomputed norms keep nothing of their separate operations, and a recomputed activation keeps no gate. Scores are
   kept, except in layers that recompute them. */
TEST(modules_of_unfused_operations) {
    cf_memory_desc desc = sizing("qwen2.5-7b", 4, 1);
    cf_memory_load load = load_of(1000, 1000, 0, 0);
    int64_t none, scores;
    desc.unfused = 1;
    none = report_of(&desc, &load).activations;
    desc.parallel.recompute = CF_RECOMPUTE_LAYERNORM;
    CHECK_INT(none - report_of(&desc, &load).activations, 28000 * 12 * 3584 / 4);
    desc.parallel.recompute = CF_RECOMPUTE_ACT;
    CHECK_INT(none - report_of(&desc, &load).activations, (int64_t)28000 * (12 * 3584 + 4 * 18944) / 4);
    desc.unfused_attention = 1;
    load.live_scores = load.chunk_scores = 1000 * 1000;
    scores = report_of(&desc, &load).activations;
    load.live_scores = 0;
    CHECK_INT(scores - report_of(&desc, &load).activations, 1000 * 1000 * 2 * 7 * 28);
    load.live_scores = 1000 * 1000;
    desc.parallel.recompute = CF_RECOMPUTE_SELECTIVE;
    desc.parallel.recompute_layers = 20;
    scores = report_of(&desc, &load).activations;
    load.live_scores = 0;
    CHECK_INT(scores - report_of(&desc, &load).activations, 1000 * 1000 * 2 * 7 * 8);
}

/* A trainer without mixed precision keeps, tensor by tensor: everything in fp32, and a row statistic for each norm. */
TEST(float_trainer) {
    const int64_t h = 64, heads = 4, kv = 2 * 16, f = 176, vocab = 256, layers = 3;
    cf_model small = {0};
    cf_memory_desc desc = sizing("qwen2.5-7b", 1, 1);
    cf_token_bytes bytes;
    int64_t a_layer = h + 1 + h + h + kv + kv + h + heads + h + 1 + h + f + f + f, row;
    small.name = "small";
    small.layers = layers;
    small.hidden = h;
    small.heads = heads;
    small.kv_heads = 2;
    small.ffn = f;
    small.vocab = vocab;
    small.tied = 1;
    desc.model = &small;
    desc.loss = CF_LOSS_PARALLEL;
    desc.activation_bytes = desc.parameter_bytes = desc.state_bytes = 4;
    REQUIRE(cf_memory_token_bytes(&desc, 0, &bytes, NULL) == CF_OK);
    row = layers * a_layer + h + 1 + h + vocab; /* output, norm, softmax */
    CHECK(fabs((double)bytes.activations / (double)(4 * row) - 1) < 0.02);
    CHECK_INT(bytes.state, layers * 2 * kv * 4);
    CHECK_INT(bytes.boundary, 4 * h);
}

/* Attention outputs by kind: heads x value_dim numbers of two bytes, and a log-sum-exp of four bytes a head. 8 heads of
   64 take 1,056 bytes; with V of 32, 544; on two GPUs half. Windows of fewer than 2,048 rows and recurrent layers keep
   none. */
TEST(outputs_of_kinds_by_hand) {
    static const struct {
        cf_layer kind;
        int64_t outputs;
    } kinds[] = {{{.mixer = CF_MIXER_FULL}, 1056},
                 {{.value_dim = 32, .gate = 1, .sinks = 1}, 544},
                 {{.mixer = CF_MIXER_WINDOW, .window = 2047}, 0},
                 {{.mixer = CF_MIXER_WINDOW, .window = 2048}, 1056},
                 {{.mixer = CF_MIXER_CHUNKED, .window = 8192}, 1056},
                 {{.mixer = CF_MIXER_CHUNKED, .window = 1024}, 0},
                 {{.mixer = CF_MIXER_LATENT, .latent = 512, .rope_dim = 16, .value_dim = 32}, 544},
                 {{.mixer = CF_MIXER_DELTA, .tail = 4}, 0},
                 {{.mixer = CF_MIXER_KDA, .tail = 4}, 0},
                 {{.mixer = CF_MIXER_MAMBA2, .tail = 4}, 0},
                 {{.mixer = CF_MIXER_NONE}, 0}};
    cf_model model = {.layers = 6, .hidden = 512, .heads = 8, .kv_heads = 2, .head_dim = 64, .ffn = 64, .vocab = 1000};
    cf_memory_desc desc = {0};
    cf_memory_load load = {0};
    cf_memory_report report;
    cf_token_bytes bytes, without;
    int64_t tp, i;
    load.chunk_tokens = 64;
    load.input_tokens = 1000;
    desc.model = &model;
    model.n_kinds = 1;
    for (i = 0; i < COUNT(kinds); i++)
        for (tp = 1; tp <= 2; tp++) {
            model.kinds = &kinds[i].kind;
            desc.parallel.tp = tp;
            desc.outputs = 0;
            REQUIRE(cf_memory_token_bytes(&desc, 0, &without, NULL) == CF_OK);
            CHECK_INT(without.dropped, without.boundary);
            CHECK_INT(without.staged, without.boundary);
            desc.outputs = 1;
            REQUIRE(cf_memory_token_bytes(&desc, 0, &bytes, NULL) == CF_OK);
            CHECK_INT(bytes.dropped, 1024 / tp + 6 * kinds[i].outputs / tp);
            REQUIRE(cf_memory_estimate(&desc, &load, 1, &report, 1, NULL) == CF_OK);
            CHECK_INT(report.inputs, 1000 * bytes.dropped);
            without.dropped = bytes.dropped;
            without.staged = bytes.staged;
            CHECK(memcmp(&without, &bytes, sizeof bytes) == 0);
            desc.outputs = 2;
            REQUIRE(cf_memory_estimate(&desc, &load, 1, &report, 1, NULL) == CF_OK);
            CHECK_INT(report.inputs, 2 * 64 * (1024 + kinds[i].outputs) / tp); /* for one layer at a time */
            CHECK_INT(report.host, 1000 * bytes.dropped);
            CHECK_INT(report.state, 0);
            desc.outputs = 1;
            desc.state_window = 64; /* then in host memory, except for two chunks */
            REQUIRE(cf_memory_estimate(&desc, &load, 1, &report, 1, NULL) == CF_OK);
            CHECK_INT(report.inputs, 2 * 64 * (1024 + kinds[i].outputs) / tp);
            CHECK_INT(report.host, 1000 * bytes.dropped);
            desc.state_window = 0;
        }
}

/* One layer of 7B, 32B, 72B and 30B-A3B: 2 x heads x 128 + 4 x heads bytes. */
TEST(outputs_of_models_by_hand) {
    static const struct {
        const char *name;
        int64_t layers, a_layer;
    } rows[] = {{"qwen2.5-7b", 28, 7280}, {"qwen2.5-32b", 64, 10400}, {"qwen2.5-72b", 80, 16640},
                {"qwen3-30b-a3b", 48, 8320}};
    int64_t i;
    for (i = 0; i < COUNT(rows); i++) {
        cf_memory_desc desc = sizing(rows[i].name, 1, 1);
        cf_token_bytes bytes;
        desc.outputs = 1;
        REQUIRE(cf_memory_token_bytes(&desc, 0, &bytes, NULL) == CF_OK);
        CHECK_INT(bytes.dropped - bytes.boundary, rows[i].layers * rows[i].a_layer);
    }
}

/* Each offloaded part leaves the device, except for the bytes in transit: two checkpoints of the current chunk, and
   gradients of two layers. These take twice the bytes of the two layers that ZeRO 3 gathers. */
TEST(offload_by_hand) {
    const int64_t row = 2 * 3584, all = 28 * row;
    cf_memory_desc desc = sizing("qwen2.5-7b", 1, 1);
    cf_memory_load load = {0};
    cf_memory_report whole, gathers_none, report;
    cf_token_bytes bytes, away;
    load.live_tokens = 1000;
    load.chunk_tokens = 64;
    desc.fragmentation = -1;
    desc.parallel.dp = 4;
    desc.parallel.recompute = CF_RECOMPUTE_FULL;
    desc.parallel.zero = 2;
    REQUIRE(cf_memory_estimate(&desc, &load, 1, &gathers_none, 1, NULL) == CF_OK);
    desc.parallel.zero = 3;
    REQUIRE(cf_memory_estimate(&desc, &load, 1, &whole, 1, NULL) == CF_OK);
    REQUIRE(cf_memory_token_bytes(&desc, 0, &bytes, NULL) == CF_OK);
    CHECK_INT(bytes.checkpoints, 0);
    desc.offload = CF_OFFLOAD_CHECKPOINTS;
    REQUIRE(cf_memory_token_bytes(&desc, 0, &away, NULL) == CF_OK);
    REQUIRE(cf_memory_estimate(&desc, &load, 1, &report, 1, NULL) == CF_OK);
    CHECK_INT(away.checkpoints, all);
    CHECK_INT(bytes.activations - away.activations, all);
    CHECK_INT(away.buffers - bytes.buffers, 2 * row);
    CHECK_INT(report.host, 1000 * all);
    CHECK_INT(whole.total - report.total, 1000 * all - 64 * 2 * row);
    desc.offload = CF_OFFLOAD_OPTIMIZER;
    REQUIRE(cf_memory_estimate(&desc, &load, 1, &report, 1, NULL) == CF_OK);
    CHECK_INT(report.optimizer, 0);
    CHECK_INT(report.gradients, 2 * (whole.buffers - gathers_none.buffers));
    CHECK_INT(report.host, whole.optimizer + whole.gradients);
    desc.offload = CF_OFFLOAD_ALL;
    REQUIRE(cf_memory_estimate(&desc, &load, 1, &report, 1, NULL) == CF_OK);
    CHECK_INT(report.parameters, 0);
    CHECK_INT(report.host, whole.optimizer + whole.gradients + whole.parameters + 1000 * all);
    desc.offload = CF_OFFLOAD_OPTIMIZER;
    desc.parallel.zero = 1; /* gradients are whole until they are reduced */
    REQUIRE(cf_memory_estimate(&desc, &load, 1, &report, 1, NULL) == CF_OK);
    CHECK_INT(report.gradients, 4 * whole.gradients);
    CHECK_INT(report.host, whole.optimizer);
}

TEST(offload_refuses_by_name) {
    cf_memory_desc desc = sizing("qwen2.5-7b", 1, 1);
    cf_token_bytes bytes;
    cf_error error;
    desc.offload = CF_OFFLOAD_CHECKPOINTS;
    desc.parallel.recompute = CF_RECOMPUTE_MLP;
    CHECK_INT(cf_memory_token_bytes(&desc, 0, &bytes, &error), CF_ERROR_ARGUMENT);
    CHECK_STR(error.text, "offload: checkpoints need full recomputation");
    desc.offload = CF_OFFLOAD_PARAMETERS;
    desc.parallel.zero = 2;
    CHECK_INT(cf_memory_token_bytes(&desc, 0, &bytes, &error), CF_ERROR_ARGUMENT);
    CHECK_STR(error.text, "offload: parameters need ZeRO 3, which gathers them");
    desc.offload = CF_OFFLOAD_ALL + 1;
    CHECK_INT(cf_memory_token_bytes(&desc, 0, &bytes, &error), CF_ERROR_ARGUMENT);
    CHECK_STR(error.field, "offload");
}

TEST(losses_keep_what_they_say) {
    static const int64_t kept[] = {0, 4, 4, 2, 0}, more[] = {0, 6, 10, 0, 0}, hidden[] = {2, 0, 0, 0, 2};
    cf_memory_desc desc = sizing("qwen2.5-7b", 4, 1);
    cf_token_bytes bytes;
    int64_t without = 28 * (158720 + 4 * 28) / 4 + 8 + 4 * 3584 / 4;
    int loss;
    for (loss = 0; loss < CF_LOSS_COUNT; loss++) {
        desc.loss = (cf_loss)loss;
        REQUIRE(cf_memory_token_bytes(&desc, 0, &bytes, NULL) == CF_OK);
        CHECK_INT(bytes.logits, more[loss] * 152064 / 4);
        CHECK_INT(bytes.activations - without, (kept[loss] * 152064 + hidden[loss] * 3584) / 4);
    }
}

/* One row of hidden states for each neighbour and direction. A middle stage receives and sends activations and
   gradients, one at an end half of that, and a single stage nothing. Tensor parallelism adds the gathered rows and
   their gradient. */
TEST(buffers_are_those_of_the_neighbours) {
    static const int64_t depths[] = {1, 2, 4};
    int64_t tp, virtual_stages;
    int d;
    for (d = 0; d < 3; d++)
        for (tp = 1; tp <= 4; tp *= 4)
            for (virtual_stages = 1; virtual_stages <= 2; virtual_stages++) {
                cf_memory_desc desc = sizing("qwen2.5-7b", tp, depths[d]);
                const int64_t row = 2 * 3584 / tp, n = depths[d] * virtual_stages, gathered = tp > 1 ? 2 * 2 * 3584 : 0;
                int64_t v;
                desc.parallel.n_virtual = virtual_stages;
                for (v = 0; v < n; v++) {
                    cf_token_bytes bytes;
                    REQUIRE(cf_memory_token_bytes(&desc, v, &bytes, NULL) == CF_OK);
                    CHECK_INT(bytes.boundary, row);
                    CHECK_INT(bytes.buffers, ((v > 0) + (v + 1 < n)) * 2 * row + gathered);
                }
            }
}

/* ---- model states ---- */

/* Bytes per parameter as in the Megatron and ZeRO papers: 18; 6 + 12 / d; 2 + 16 / d; 18 / d. */
TEST(zero_divides_states) {
    int64_t zero, d;
    for (zero = 0; zero <= 3; zero++) {
        for (d = 1; d <= 64; d *= 4) {
            cf_memory_desc desc = sizing("llama-3-8b", 1, 1);
            cf_memory_load load = load_of(0, 0, 0, 0);
            double whole[] = {18, 6, 2, 0}, divided[] = {0, 12, 16, 18}, wanted, got;
            cf_memory_report report;
            desc.parallel.zero = zero;
            desc.parallel.dp = d;
            report = report_of(&desc, &load);
            got = (double)(report.parameters + report.gradients + report.optimizer);
            wanted = 8030261248.0 * (whole[zero] + divided[zero] / (double)d);
            CHECK(fabs(got - wanted) <= 3); /* each term is rounded up */
            CHECK_INT(report.buffers > 0, zero == 3 && d > 1);
        }
    }
}

/* If a fifth of a number that is not a multiple of five is rounded down, some rank has too little. */
TEST(shares_are_rounded_up) {
    cf_memory_desc desc = sizing("llama-3-8b", 1, 1);
    cf_memory_load load = load_of(0, 0, 0, 0);
    cf_memory_report report;
    desc.parallel.zero = 3;
    desc.parallel.dp = 5;
    report = report_of(&desc, &load);
    CHECK_INT(report.parameters, 3212104500);   /* 2 x 8,030,261,248 / 5 = 3,212,104,499.2 */
    CHECK_INT(report.gradients, 6424208999);   /* 4 x: 6,424,208,998.4 */
    CHECK_INT(report.optimizer, 19272626996);  /* 12 x: 19,272,626,995.2 */
}

/* Two layers are whole at a time; embedding and head are not layers. A layer of Llama 3 8B by hand: Q and output, K and
   V, the MLP, two norms. The final norm may be spread over all layers. */
TEST(zero_3_gathers_two_layers) {
    const int64_t layer = 2 * 4096 * 4096 + 2 * 4096 * 1024 + 3 * 4096 * 14336 + 2 * 4096;
    cf_memory_desc desc = sizing("llama-3-8b", 1, 1);
    cf_memory_load load = load_of(0, 0, 0, 0);
    int64_t gathered;
    desc.parallel.zero = 3;
    desc.parallel.dp = 2;
    gathered = report_of(&desc, &load).buffers;
    CHECK(gathered >= 2 * 2 * layer && gathered <= 2 * 2 * (layer + 4096));
    /* every second layer has 128 experts, and the largest layer counts */
    desc.model = cf_model_find("llama-4-maverick");
    CHECK(report_of(&desc, &load).buffers > 2 * 2 * 128LL * 3 * 5120 * 8192);
}

/* ---- the whole ---- */

static int64_t sum_of_terms(const cf_memory_report *report) {
    int64_t sum = 0;
#define ADD(name, text) sum += report->name;
    CF_MEMORY_TERMS(ADD)
#undef ADD
    return sum;
}

/* Doubling the load doubles each term that depends on it. Terms add up to the total, and the runtime term is never
   0. */
TEST(reports_add_up) {
    harness_rng rng = {41};
    int round;
    for (round = 0; round < 300; round++) {
        const cf_model *m = cf_model_find(models[harness_between(&rng, 0, COUNT(models) - 1)]);
        cf_memory_desc desc = sizing(m->name, (int64_t)1 << harness_between(&rng, 0, 3), 1);
        cf_memory_load load, twice;
        cf_memory_report once, double_load;
        desc.loss = (cf_loss)harness_between(&rng, 0, CF_LOSS_COUNT - 1);
        desc.unfused = (int)harness_between(&rng, 0, 1);
        desc.parallel.recompute = (cf_recompute)harness_between(&rng, 0, CF_RECOMPUTE_COUNT - 1);
        desc.fragmentation = harness_between(&rng, -1, 30);
        if (cf_parallel_validate(m, &desc.parallel, NULL) != CF_OK) continue;
        load = load_of(harness_between(&rng, 0, 100000), harness_between(&rng, 0, 8192),
                       harness_between(&rng, 0, 300000), harness_between(&rng, 0, 300000));
        load.input_tokens = harness_between(&rng, 0, 100000);
        twice = load;
        twice.live_tokens *= 2;
        twice.state_tokens *= 2;
        twice.input_tokens *= 2;
        once = report_of(&desc, &load);
        double_load = report_of(&desc, &twice);
        CHECK_INT(sum_of_terms(&once), once.total);
        CHECK_INT(double_load.activations, 2 * once.activations);
        CHECK_INT(double_load.state, 2 * once.state);
        CHECK_INT(double_load.inputs, 2 * once.inputs);
        CHECK(once.host == 0 && double_load.host == 0);
        CHECK_INT(double_load.state_gradient, once.state_gradient);
        CHECK(once.runtime >= CF_RUNTIME_BYTES);
        CHECK(once.at_loss ? once.working == 0 : once.logits == 0);
    }
}

/* With a window the device holds `window` rows of one layer, however large the state is. The host holds all of it. By
   hand for Qwen2.5 7B on four GPUs: 28 layers with one K head of 128 on each GPU. A layer's K and V take 512 bytes a
   row, their gradients 1024, and a stage input 3584 x 2 / 4 = 1792. */
TEST(a_window_of_the_state) {
    const int64_t context[] = {32768, 262144, 1048576};
    int64_t i, inputs;
    for (i = 0; i < 6; i++) {
        cf_memory_desc desc = sizing("qwen2.5-7b", 4, 1);
        cf_memory_load load = load_of(8192, 8192, context[i / 2], context[i / 2] - 8192);
        cf_memory_report all, streamed;
        desc.loss = CF_LOSS_CHUNKED; /* the peak is in a layer */
        all = report_of(&desc, &load);
        inputs = i % 2 * context[i / 2];
        load.input_tokens = inputs;
        desc.state_window = 5000;
        streamed = report_of(&desc, &load);
        CHECK_INT(streamed.state, 5000 * 512);
        CHECK_INT(streamed.state_gradient, 5000 * 1024);
        CHECK_INT(streamed.inputs, inputs > 0 ? 2 * 8192 * 1792 : 0);
        CHECK_INT(streamed.host, 28 * (context[i / 2] * 512 + (context[i / 2] - 8192) * 1024) + inputs * 1792);
        CHECK_INT(streamed.host, all.state + all.state_gradient + inputs * 1792);
        CHECK_INT(streamed.activations, all.activations);
        CHECK_INT(streamed.working, all.working + 8192 * 7 * (128 + 2) * 4); /* 7 of 28 heads, see below */
        CHECK_INT(streamed.parameters, all.parameters);
        CHECK_INT(sum_of_terms(&streamed), streamed.total);
    }
}

/* All virtual stages of a stage share one ring, and without state there is none. Fewer inputs than two chunks stay on
   the device. */
TEST(a_window_is_a_stage_s) {
    cf_memory_desc desc = sizing("qwen2.5-7b", 1, 2);
    cf_memory_load loads[4];
    cf_memory_report reports[2];
    int64_t s;
    desc.parallel.n_virtual = 2;
    desc.state_window = 100;
    for (s = 0; s < 4; s++) loads[s] = load_of(4096, 4096, 0, 0);
    loads[0].state_tokens = 50; /* less than the ring's size, which is allocated in full */
    loads[2].state_tokens = 10000;
    loads[2].state_gradient_tokens = 7000;
    loads[2].input_tokens = 5000;
    loads[1].input_tokens = 30000;
    REQUIRE(cf_memory_estimate(&desc, loads, 4, reports, 2, NULL) == CF_OK);
    CHECK_INT(reports[0].state, 100 * 2 * 512 * 2); /* four K heads of 128, K and V, two bytes */
    CHECK_INT(reports[0].state_gradient, 100 * 2 * 512 * 4);
    CHECK_INT(reports[0].inputs, 5000 * 7168);
    CHECK_INT(reports[0].host, (50 + 10000) * 7 * 2048 + 7000 * 7 * 4096 + 5000 * 7168);
    CHECK_INT(reports[1].state, 0);
    CHECK_INT(reports[1].state_gradient, 0);
    CHECK_INT(reports[1].inputs, 2 * 4096 * 7168);
    CHECK_INT(reports[1].host, 30000 * 7168);
}

/* With a window no state on the device grows with the tokens. But the current chunk holds the fp32 sums that attention
   carries from block to block: for each query head a row of the output or of dQ, and two numbers. Counted one by
   one. */
TEST(a_window_leaves_no_token_bytes_of_state) {
    static const cf_layer near = {.mixer = CF_MIXER_WINDOW, .window = 64};
    cf_memory_desc desc = sizing("qwen2.5-7b", 4, 1);
    cf_model model = *desc.model;
    cf_token_bytes with, without;
    int head, number;
    REQUIRE(cf_memory_token_bytes(&desc, 0, &without, NULL) == CF_OK);
    desc.state_window = 1;
    REQUIRE(cf_memory_token_bytes(&desc, 0, &with, NULL) == CF_OK);
    CHECK_INT(with.state, 0);
    CHECK_INT(with.state_gradient, 0);
    without.state = without.state_gradient = 0;
    for (head = 0; head < 28 / 4; head++) {
        for (number = 0; number < 128; number++) without.working += (int64_t)sizeof(float);
        without.working += 2 * (int64_t)sizeof(float);
    }
    CHECK(memcmp(&with, &without, sizeof with) == 0);
    model.kinds = &near; /* whose rows stay on the device, for any length of the sequence */
    model.n_kinds = 1;
    desc.model = &model;
    REQUIRE(cf_memory_token_bytes(&desc, 0, &with, NULL) == CF_OK);
    desc.state_window = 0;
    REQUIRE(cf_memory_token_bytes(&desc, 0, &without, NULL) == CF_OK);
    CHECK(memcmp(&with, &without, sizeof with) == 0);
}

/* Each GPU needs at least one K head. Beyond kv_heads, more tensor parallelism does not make the state smaller. */
TEST(replicated_heads_keep_their_state) {
    cf_token_bytes four, eight, sixteen;
    cf_memory_desc desc = sizing("qwen2.5-3b", 2, 1); /* 16 heads, 2 K heads */
    REQUIRE(cf_memory_token_bytes(&desc, 0, &four, NULL) == CF_OK);
    desc.parallel.tp = 8;
    REQUIRE(cf_memory_token_bytes(&desc, 0, &eight, NULL) == CF_OK);
    desc.parallel.tp = 16;
    REQUIRE(cf_memory_token_bytes(&desc, 0, &sixteen, NULL) == CF_OK);
    CHECK_INT(four.state, 36864 / 2);
    CHECK_INT(eight.state, four.state);
    CHECK_INT(sixteen.state, four.state);
}

/* A stage with two virtual stages holds the bytes of both, and works on one at a time. */
TEST(virtual_stages_share_a_gpu) {
    cf_memory_desc looped = sizing("qwen2.5-32b", 8, 4), flat = sizing("qwen2.5-32b", 8, 8);
    cf_memory_load loads[8];
    cf_memory_report four[4], eight[8];
    int64_t s;
    looped.parallel.n_virtual = 2;
    looped.loss = flat.loss = CF_LOSS_PARALLEL;
    for (s = 0; s < 8; s++) loads[s] = load_of(4096 * (8 - s), 4096, 100000 + s, 5000 * s);
    REQUIRE(cf_memory_estimate(&looped, loads, 8, four, 4, NULL) == CF_OK);
    REQUIRE(cf_memory_estimate(&flat, loads, 8, eight, 8, NULL) == CF_OK);
    for (s = 0; s < 4; s++) {
        const cf_memory_report *a = &eight[s], *b = &eight[s + 4];
        CHECK_INT(four[s].parameters, a->parameters + b->parameters);
        CHECK_INT(four[s].gradients, a->gradients + b->gradients);
        CHECK_INT(four[s].optimizer, a->optimizer + b->optimizer);
        CHECK_INT(four[s].activations, a->activations + b->activations);
        CHECK_INT(four[s].state, a->state + b->state);
        CHECK_INT(four[s].state_gradient, a->state_gradient + b->state_gradient);
        CHECK_INT(four[s].buffers, a->buffers > b->buffers ? a->buffers : b->buffers);
        CHECK_INT(four[s].logits, b->logits);
        CHECK(four[s].runtime < a->runtime + b->runtime);
    }
    CHECK(four[3].at_loss && four[3].logits > 0 && !four[0].at_loss && four[0].working > 0);
}

/* ---- what the paper measured ---- */

/* Peak memory of Qwen2.5-7B, in GiB, by ChunkSize and context (Yuan et al. 2025), <TP 4, SP 4, PP 1, selective>, K = 1,
   on four GPUs, so without data parallelism. Then the peak of plain training at 32K in the same setup (its Figure 1),
   75 GB.

   One set of assumptions serves all seven: the defaults of cf_memory_desc, except for the loss, which is fused. With
   the fp32 copies of CF_LOSS_PARALLEL the plain 32K sequence would not have fitted into 80 GB, and with unfused
   operations even less.

   Plain load: the sequence. Chunked load: the peak is the forward of the last chunk. The state of the whole sequence is
   there then, but its gradient is not. The chunk before it, whose forward will be dropped, still holds its activations
   until its loss variable is assigned again: so two chunks, not one.

   This is inferred, not published: the table grows by 2.95 MiB a token, plain training by at most 1.3, and one chunk's
   activations by 1.14 here. The model's own slope is 2.54 (two chunks, their gathered rows and 10 % lost in gaps), so
   its residuals grow with ChunkSize. */
static double paper_gib(int64_t chunk, int64_t context, int64_t live) {
    cf_memory_desc desc = sizing("qwen2.5-7b", 4, 1);
    cf_memory_load load = load_of(live, chunk, chunk < context ? context : 0, 0);
    desc.parallel.recompute = CF_RECOMPUTE_SELECTIVE;
    desc.loss = CF_LOSS_FUSED;
    return total_gib(&desc, &load);
}

TEST(paper_peak_memory_table) {
    static const struct {
        int64_t chunk, context;
        double gib;
    } table[] = {{2048, 32768, 41.6},  {4096, 32768, 47.5},  {8192, 32768, 59.3},
                 {2048, 262144, 45.6}, {4096, 262144, 50.8}, {8192, 262144, 63.8}};
    double worst = 0;
    int64_t i;
    for (i = 0; i < COUNT(table); i++) {
        double got = paper_gib(table[i].chunk, table[i].context, 2 * table[i].chunk), residual = got / table[i].gib - 1;
        harness_note("%d tokens a chunk, context %d: %.2f GiB, measured %.1f (%+.1f %%)", (int)table[i].chunk,
                     (int)table[i].context, got, table[i].gib, 100 * residual);
        CHECK(fabs(residual) <= 0.10);
        if (fabs(residual) > fabs(worst)) worst = residual;
    }
    harness_note("%s", "");
    harness_report("worst residual %+.1f %%", 100 * worst);
}

/* 75 GB read either way. */
TEST(paper_plain_training_peak) {
    double got = paper_gib(32768, 32768, 32768);
    CHECK(fabs(got / 75 - 1) <= 0.10);
    CHECK(fabs(got / (75e9 / GIB) - 1) <= 0.10);
    harness_report("%.1f GiB, measured 75", got);
}

/* ---- nonsense ---- */

TEST(outputs_refuse_by_name) {
    cf_memory_desc desc = sizing("qwen2.5-7b", 1, 1);
    cf_token_bytes bytes;
    cf_error error;
    desc.outputs = 1;
    desc.parallel.recompute = CF_RECOMPUTE_FULL;
    CHECK_INT(cf_memory_token_bytes(&desc, 0, &bytes, &error), CF_ERROR_ARGUMENT);
    CHECK_STR(error.text, "outputs: are dropped again with full recomputation");
    desc.parallel.recompute = CF_RECOMPUTE_MLP;
    desc.unfused_attention = 1;
    CHECK_INT(cf_memory_token_bytes(&desc, 0, &bytes, &error), CF_ERROR_ARGUMENT);
    CHECK_STR(error.text, "outputs: need attention that does not write out its scores");
    desc.unfused_attention = 0;
    CHECK_INT(cf_memory_token_bytes(&desc, 0, &bytes, &error), CF_OK);
    desc.outputs = 3;
    CHECK_INT(cf_memory_token_bytes(&desc, 0, &bytes, &error), CF_ERROR_ARGUMENT);
    CHECK_STR(error.field, "outputs");
}

TEST(bad_sizings_are_named) {
    static const struct {
        size_t member;
        int64_t value;
        const char *field;
        int64_t wanted;
        cf_result code;
    } cases[] = {
        {offsetof(cf_memory_desc, activation_bytes), -2, "activation_bytes", 1, CF_ERROR_ARGUMENT},
        {offsetof(cf_memory_desc, parameter_bytes), -2, "parameter_bytes", 1, CF_ERROR_ARGUMENT},
        {offsetof(cf_memory_desc, gradient_bytes), -1, "gradient_bytes", 1, CF_ERROR_ARGUMENT},
        {offsetof(cf_memory_desc, optimizer_bytes), INT64_MAX, "optimizer_bytes", 1024, CF_ERROR_LIMIT},
        {offsetof(cf_memory_desc, state_bytes), -1, "state_bytes", 1, CF_ERROR_ARGUMENT},
        {offsetof(cf_memory_desc, state_gradient_bytes), 1025, "state_gradient_bytes", 1024, CF_ERROR_LIMIT},
        {offsetof(cf_memory_desc, runtime_bytes), -1, "runtime_bytes", 1, CF_ERROR_ARGUMENT},
        {offsetof(cf_memory_desc, fragmentation), -2, "fragmentation", -1, CF_ERROR_ARGUMENT},
        {offsetof(cf_memory_desc, state_window), -1, "state_window", 0, CF_ERROR_ARGUMENT},
        {offsetof(cf_memory_desc, state_window), CF_MAX_LENGTH + 1, "state_window", CF_MAX_LENGTH, CF_ERROR_LIMIT},
        {offsetof(cf_memory_desc, parallel) + offsetof(cf_parallel, tp), 3, "parallel.tp", 2, CF_ERROR_ARGUMENT},
    };
    cf_memory_load load = load_of(1, 1, 1, 1);
    cf_memory_report report;
    cf_token_bytes bytes;
    cf_memory_desc desc;
    cf_error error;
    int64_t i;
    harness_poison(&report, sizeof report);
    harness_poison(&bytes, sizeof bytes);
    for (i = 0; i < COUNT(cases); i++) {
        desc = sizing("qwen2.5-7b", 1, 1);
        memcpy((char *)&desc + cases[i].member, &cases[i].value, sizeof cases[i].value);
        CHECK_INT(cf_memory_estimate(&desc, &load, 1, &report, 1, &error), cases[i].code);
        CHECK_STR(error.field, cases[i].field);
        CHECK_INT(error.wanted, cases[i].wanted);
        CHECK_INT(cf_memory_token_bytes(&desc, 0, &bytes, &error), cases[i].code);
        CHECK_STR(error.field, cases[i].field);
    }
    desc = sizing("qwen2.5-7b", 1, 1);
    desc.loss = CF_LOSS_COUNT;
    CHECK_INT(cf_memory_estimate(&desc, &load, 1, &report, 1, &error), CF_ERROR_ARGUMENT);
    CHECK_STR(error.field, "loss");
    desc = sizing("no such model", 1, 1);
    CHECK_INT(cf_memory_estimate(&desc, &load, 1, &report, 1, &error), CF_ERROR_ARGUMENT);
    CHECK_STR(error.field, "model");
    desc = sizing("qwen2.5-7b", 1, 2);
    CHECK_INT(cf_memory_estimate(&desc, &load, 1, &report, 2, &error), CF_ERROR_ARGUMENT);
    CHECK_STR(error.field, "n_loads");
    CHECK_INT(error.wanted, 2);
    CHECK_INT(cf_memory_token_bytes(&desc, 2, &bytes, &error), CF_ERROR_ARGUMENT);
    CHECK_STR(error.field, "stage");
    desc = sizing("qwen2.5-7b", 1, 1);
    CHECK_INT(cf_memory_estimate(&desc, &load, 1, &report, 2, &error), CF_ERROR_ARGUMENT);
    CHECK_STR(error.field, "n_reports");
    CHECK_INT(error.wanted, 1);
    CHECK_INT(error.got, 2);
    CHECK_INT(cf_memory_estimate(NULL, &load, 1, &report, 1, &error), CF_ERROR_ARGUMENT);
    CHECK_INT(cf_memory_estimate(&desc, NULL, 1, &report, 1, &error), CF_ERROR_ARGUMENT);
    CHECK_INT(cf_memory_estimate(&desc, &load, 1, NULL, 1, &error), CF_ERROR_ARGUMENT);
    CHECK_POISON(&report, sizeof report);
    CHECK_POISON(&bytes, sizeof bytes);
}

TEST(bad_loads_are_named) {
    static const struct {
        size_t member;
        const char *field;
        int counted; /* its largest value overflows a sum of this model */
    } members[] = {
        {offsetof(cf_memory_load, live_tokens), "loads.live_tokens", 1},
        {offsetof(cf_memory_load, chunk_tokens), "loads.chunk_tokens", 1},
        {offsetof(cf_memory_load, state_tokens), "loads.state_tokens", 1},
        {offsetof(cf_memory_load, state_gradient_tokens), "loads.state_gradient_tokens", 1},
        {offsetof(cf_memory_load, input_tokens), "loads.input_tokens", 1},
        {offsetof(cf_memory_load, live_scores), "loads.live_scores", 0},
        {offsetof(cf_memory_load, chunk_scores), "loads.chunk_scores", 0},
    };
    const int64_t negative = -1, largest = INT64_MAX;
    int64_t i;
    for (i = 0; i < COUNT(members); i++) {
        cf_memory_desc desc = sizing("qwen2.5-7b", 1, 2);
        cf_memory_load loads[2] = {0};
        cf_memory_report reports[2];
        cf_error error;
        harness_poison(reports, sizeof reports);
        memcpy((char *)&loads[1] + members[i].member, &negative, sizeof negative);
        CHECK_INT(cf_memory_estimate(&desc, loads, 2, reports, 2, &error), CF_ERROR_ARGUMENT);
        CHECK_STR(error.field, members[i].field);
        CHECK_INT(error.item, 1);
        CHECK_POISON(reports, sizeof reports);
        memcpy((char *)&loads[1] + members[i].member, &largest, sizeof largest);
        if (members[i].counted) {
            CHECK_INT(cf_memory_estimate(&desc, loads, 2, reports, 2, &error), CF_ERROR_OVERFLOW);
            CHECK_POISON(reports, sizeof reports);
        } else {
            CHECK_INT(cf_memory_estimate(&desc, loads, 2, reports, 2, &error), CF_OK);
            desc.unfused_attention = 1; /* only now scores are counted */
            CHECK_INT(cf_memory_estimate(&desc, loads, 2, reports, 2, &error), CF_ERROR_OVERFLOW);
        }
    }
}

SUITE(memory, CASE(state_of_kinds_by_hand), CASE(windows_stop_growing), CASE(experts_are_divided),
      CASE(optimizers_by_hand),
      CASE(rows_of_experts_by_hand), CASE(odd_bytes_are_rounded_up), CASE(kinds_of_other_stages_cost_nothing),
      CASE(bytes_per_token_by_hand), CASE(korthikanti_table_2),
      CASE(megatron_activation_formula),
      CASE(unfused_operations_keep_more), CASE(scores_are_those_of_attention_layers), CASE(working_rows_by_hand),
      CASE(float_trainer), CASE(outputs_of_kinds_by_hand), CASE(outputs_of_models_by_hand),
      CASE(outputs_refuse_by_name), CASE(offload_by_hand), CASE(offload_refuses_by_name),
      CASE(losses_keep_what_they_say), CASE(buffers_are_those_of_the_neighbours), CASE(zero_divides_states),
      CASE(reports_add_up), CASE(full_recompute_makes_all_of_a_layer), CASE(modules_made_again),
      CASE(modules_of_unfused_operations), CASE(shares_are_rounded_up), CASE(zero_3_gathers_two_layers),
      CASE(a_window_of_the_state), CASE(a_window_is_a_stage_s), CASE(a_window_leaves_no_token_bytes_of_state),
      CASE(replicated_heads_keep_their_state), CASE(virtual_stages_share_a_gpu), CASE(paper_peak_memory_table),
      CASE(paper_plain_training_peak), CASE(bad_sizings_are_named), CASE(bad_loads_are_named));
