/* Tests >>model, and the tuner's >>fit and >>estimate: models, splits, GPUs, estimated and fitted costs. */

#include "chunkflow.h"
#include "../harness.h"
#include "tools/chunkflow_tune.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

static cf_parallel split(int64_t tp, int64_t pp, int64_t dp) {
    cf_parallel parallel = {0};
    parallel.tp = tp;
    parallel.pp = pp;
    parallel.dp = dp;
    return parallel;
}

/* ---- parameter counts ---- */

/* Published with the models. */
static const struct {
    const char *name;
    int64_t parameters;
} published[] = {
    {"qwen2.5-0.5b", 494032768},   {"qwen2.5-1.5b", 1543714304},  {"qwen2.5-3b", 3085938688},
    {"qwen2.5-7b", 7615616512},    {"qwen2.5-14b", 14770033664},  {"qwen2.5-32b", 32763876352},
    {"qwen2.5-72b", 72706203648},  {"qwen3-0.6b", 596049920},     {"qwen3-1.7b", 1720574976},
    {"qwen3-4b", 4022468096},      {"qwen3-8b", 8190735360},      {"qwen3-14b", 14768307200},
    {"qwen3-32b", 32762123264},    {"llama-3-8b", 8030261248},    {"llama-3-70b", 70553706496},
    {"llama-3.1-405b", 405853388800}, {"llama-3.2-1b", 1235814400}, {"llama-3.2-3b", 3212749824},
};

TEST(counts_are_the_published_ones) {
    int64_t i;
    for (i = 0; i < COUNT(published); i++) {
        const cf_model *model = cf_model_find(published[i].name);
        cf_parameters counted;
        REQUIRE(model != NULL);
        harness_note("%s", published[i].name);
        CHECK_INT(cf_model_parameters(model, &counted, NULL), CF_OK);
        CHECK_INT(counted.total, published[i].parameters);
        CHECK_INT(counted.embedding + counted.attention + counted.mlp + counted.norms + counted.head, counted.total);
    }
}

static const char *const gpus[] = {"a100-40g", "a100-80g", "h100-80g", "h200", "b200", "gb200", "b300", "gb300",
                                   "gh200-96g", "h800-80g", "a800-80g", "h20", "mi300x", "mi355x", "l40s", "rtx4090",
                                   "rtx5090", "rtx-pro-6000"};

TEST(names_are_found_in_any_case) {
    int64_t i, j;
    CHECK(cf_model_find("Qwen2.5-7B") == cf_model_find("qwen2.5-7b"));
    CHECK(cf_model_find("qwen2.5-7b") != NULL);
    CHECK(cf_model_find("qwen2.5-7") == NULL && cf_model_find("qwen2.5-7bb") == NULL && cf_model_find("") == NULL);
    CHECK(cf_model_find(NULL) == NULL && cf_gpu_find(NULL) == NULL);
    CHECK(cf_gpu_find("H100-80G") != NULL && cf_gpu_find("h100-80g")->memory > (int64_t)79 << 30);
    for (i = 0; i < COUNT(published); i++)
        for (j = 0; j < i; j++) CHECK(cf_model_find(published[i].name) != cf_model_find(published[j].name));
    for (i = 0; i < COUNT(gpus); i++) CHECK(cf_gpu_find(gpus[i]) && strcmp(cf_gpu_find(gpus[i])->name, gpus[i]) == 0);
}

TEST(export_versions_differ_in_nvlink_alone) {
    static const char *const pairs[][2] = {{"h100-80g", "h800-80g"}, {"a100-80g", "a800-80g"}};
    int64_t i;
    for (i = 0; i < COUNT(pairs); i++) {
        cf_gpu own = *cf_gpu_find(pairs[i][0]);
        const cf_gpu *export_version = cf_gpu_find(pairs[i][1]);
        own.name = export_version->name;
        own.nvlink = 400e9 / 2;
        CHECK(memcmp(&own, export_version, sizeof own) == 0);
    }
}

/* Counts the parameters of a checkpoint, tensor by tensor, independently of the library. */
static int64_t count_tensors(const cf_model *m) {
    int64_t dim = m->head_dim ? m->head_dim : m->hidden / m->heads, sum = m->vocab * m->hidden, layer;
    for (layer = 0; layer < m->layers; layer++) {
        sum += m->hidden * m->heads * dim;                                    /* q_proj */
        sum += m->hidden * m->kv_heads * dim + m->hidden * m->kv_heads * dim; /* k_proj, v_proj */
        sum += m->heads * dim * m->hidden;                                    /* o_proj */
        if (m->qkv_bias) sum += m->heads * dim + m->kv_heads * dim + m->kv_heads * dim;
        if (m->out_bias) sum += m->hidden;
        if (m->qk_norm) sum += m->qk_norm == 2 ? m->heads * dim + m->kv_heads * dim : dim + dim;
        sum += m->hidden * m->ffn + m->ffn * m->hidden; /* up_proj, down_proj */
        if (!m->no_gate) sum += m->hidden * m->ffn;     /* gate_proj */
        if (m->mlp_bias) sum += m->ffn + m->hidden + (m->no_gate ? 0 : m->ffn);
        sum += m->hidden + m->hidden; /* two norms */
    }
    sum += m->hidden;
    if (!m->tied) sum += m->vocab * m->hidden;
    return sum;
}

/* Draws sizes with many divisors. */
static cf_model random_model(harness_rng *rng) {
    cf_model m = {0};
    m.name = "random";
    m.layers = harness_between(rng, 1, 40);
    m.kv_heads = (int64_t)1 << harness_between(rng, 0, 3);
    m.heads = m.kv_heads * harness_between(rng, 1, 6);
    m.head_dim = harness_between(rng, 0, 1) ? 8 * harness_between(rng, 1, 16) : 0;
    m.hidden = m.heads * 8 * harness_between(rng, 1, 20);
    m.ffn = m.heads * harness_between(rng, 1, 300);
    m.vocab = harness_between(rng, 1, 5000);
    m.tied = (int)harness_between(rng, 0, 1);
    m.qkv_bias = (int)harness_between(rng, 0, 1);
    m.out_bias = (int)harness_between(rng, 0, 1);
    m.mlp_bias = (int)harness_between(rng, 0, 1);
    m.qk_norm = (int)harness_between(rng, 0, 2);
    m.no_gate = (int)harness_between(rng, 0, 1);
    return m;
}

TEST(counts_are_those_of_the_tensors) {
    harness_rng rng = {21};
    int i;
    for (i = 0; i < 500; i++) {
        cf_model model = random_model(&rng);
        cf_parameters counted;
        cf_error error;
        if (cf_model_parameters(&model, &counted, &error) != CF_OK) FAIL("%s", error.text);
        else CHECK_INT(counted.total, count_tensors(&model));
    }
}

/* The GPUs of all stages together hold the model, plus the parts that are replicated. */
TEST(stages_add_up_to_the_model) {
    harness_rng rng = {22};
    int i, checked = 0;
    for (i = 0; i < 3000; i++) {
        cf_model m = random_model(&rng);
        int64_t dim = m.head_dim ? m.head_dim : m.hidden / m.heads, s, sum = 0, layers = 0, least = INT64_MAX, most = 0;
        int64_t tp = harness_between(&rng, 1, 8), replicas = tp > m.kv_heads ? tp / m.kv_heads : 1, stages;
        cf_parallel p = split(tp, harness_between(&rng, 1, 6), 1);
        cf_parameters counted;
        cf_shard shard;
        int together; /* embedding and head lie on one stage */
        p.n_virtual = harness_between(&rng, 1, 3);
        p.placement = harness_chance(&rng, 0.5) ? CF_PLACEMENT_LOOP : CF_PLACEMENT_V;
        together = p.pp == 1 || (p.placement == CF_PLACEMENT_V && p.n_virtual == 2);
        stages = p.pp * p.n_virtual;
        if (cf_parallel_validate(&m, &p, NULL) != CF_OK) continue;
        checked++;
        for (s = 0; s < stages; s++) {
            int64_t n;
            REQUIRE(cf_stage_shard(&m, &p, s, -1, &shard, NULL) == CF_OK && shard.layers >= 1);
            n = shard.layers;
            REQUIRE(cf_stage_parameters(&m, &p, s, &counted, NULL) == CF_OK);
            layers += n;
            least = n < least ? n : least;
            most = n > most ? n : most;
            sum += counted.total * tp;
        }
        CHECK_INT(layers, m.layers);
        CHECK(most - least <= 1);
        REQUIRE(cf_stage_shard(&m, &p, stages - 1, -1, &shard, NULL) == CF_OK);
        CHECK_INT(shard.layers, least); /* the stage with the head never has more layers */
        /* replicated: norms, biases that are added once, K and V heads if there are fewer than GPUs, padding of the
           vocabulary */
        sum -= (tp - 1) * (m.layers * (2 * m.hidden + (m.qk_norm == 1 ? 2 * dim : 0)) + m.hidden);
        if (m.qk_norm == 2) sum -= (replicas - 1) * m.layers * m.kv_heads * dim;
        if (m.out_bias) sum -= (tp - 1) * m.layers * m.hidden;
        if (m.mlp_bias) sum -= (tp - 1) * m.layers * m.hidden;
        sum -= (replicas - 1) * m.layers * 2 * m.kv_heads * dim * (m.hidden + (m.qkv_bias ? 1 : 0));
        {
            int64_t padded = (m.vocab + tp - 1) / tp * tp, copies = m.tied && together ? 1 : 2;
            sum -= copies * (padded - m.vocab) * m.hidden;
            if (m.tied && !together) sum -= m.vocab * m.hidden; /* the head's copy */
        }
        CHECK_INT(sum, count_tensors(&m));
    }
    CHECK(checked > 300);
}

/* Widths by hand: heads, vocabulary and MLP are divided, hidden is not, and K and V have at least one head. */
TEST(shards_by_hand) {
    const cf_model *model = cf_model_find("qwen2.5-7b");
    cf_parallel p = split(4, 2, 1);
    cf_shard shard;
    cf_error error;
    REQUIRE(cf_stage_shard(model, &p, 1, -1, &shard, NULL) == CF_OK);
    CHECK(!shard.first && shard.last && shard.layers == 14 && shard.hidden == 3584 && shard.mlp_matrices == 3);
    CHECK(shard.heads == 7 && shard.q == 7 * 128 && shard.kv == 128 && shard.ffn == 4736);
    CHECK(shard.vocab == 38016 && shard.sequence == 4);
    p.no_sequence = 1;
    p.vocab_multiple = 128;
    REQUIRE(cf_stage_shard(model, &p, 0, -1, &shard, NULL) == CF_OK);
    CHECK(shard.first && !shard.last && shard.sequence == 1 && shard.vocab == 38016 && 38016 % 128 == 0);
    p = split(8, 1, 1);
    REQUIRE(cf_stage_shard(cf_model_find("qwen2.5-72b"), &p, 0, -1, &shard, NULL) == CF_OK);
    CHECK(shard.first && shard.last && shard.heads == 8 && shard.kv == 128 && shard.layers == 80);
    p.tp = 16;
    REQUIRE(cf_stage_shard(cf_model_find("qwen2.5-72b"), &p, 0, -1, &shard, NULL) == CF_OK);
    CHECK(shard.heads == 4 && shard.kv == 128); /* 8 K and V heads on 16 GPUs */
    harness_poison(&shard, sizeof shard);
    CHECK_INT(cf_stage_shard(model, &p, 1, -1, &shard, &error), CF_ERROR_ARGUMENT);
    CHECK_STR(error.field, "parallel.tp");
    p = split(4, 2, 1);
    CHECK_INT(cf_stage_shard(model, &p, 2, -1, &shard, &error), CF_ERROR_ARGUMENT);
    CHECK_STR(error.field, "stage");
    CHECK_POISON(&shard, sizeof shard);
    CHECK_INT(cf_stage_shard(model, &p, 0, -1, NULL, &error), CF_ERROR_ARGUMENT);
    CHECK_STR(error.field, "out");
}

TEST(layers_can_be_given_stage_by_stage) {
    const cf_model *model = cf_model_find("llama-3-8b");
    const int64_t good[] = {7, 9, 9, 7}, short_by_one[] = {7, 9, 9, 6}, empty[] = {0, 12, 12, 8};
    cf_parallel p = split(2, 4, 1);
    cf_shard shard;
    cf_error error;
    int64_t s;
    p.layers = good;
    for (s = 0; s < 4; s++) {
        REQUIRE(cf_stage_shard(model, &p, s, -1, &shard, NULL) == CF_OK);
        CHECK_INT(shard.layers, good[s]);
    }
    p.layers = short_by_one;
    CHECK_INT(cf_parallel_validate(model, &p, &error), CF_ERROR_ARGUMENT);
    CHECK_STR(error.field, "parallel.layers");
    CHECK_INT(error.wanted, 32);
    CHECK_INT(error.got, 31);
    p.layers = empty;
    CHECK_INT(cf_parallel_validate(model, &p, &error), CF_ERROR_ARGUMENT);
    CHECK_INT(error.item, 0);
    CHECK_INT(cf_stage_shard(model, &p, 4, -1, &shard, &error), CF_ERROR_ARGUMENT);
}

TEST(vocabulary_is_padded_as_megatron_does) {
    const cf_model *model = cf_model_find("qwen2.5-0.5b"); /* 151936 = 128 x 1187 */
    cf_parallel p = split(2, 1, 1);
    cf_parameters counted;
    p.vocab_multiple = 128;
    REQUIRE(cf_stage_parameters(model, &p, 0, &counted, NULL) == CF_OK);
    CHECK_INT(counted.embedding, 152064 / 2 * 896);
}

/* Megatron-LM's theoretical_memory_usage.py (compute_weight_and_optimizer_memory) for a dense model with RMSNorm: the
   most loaded shard, in parameters. Written from its formula. */
static double megatron_shard(const cf_model *m, double tp, double pp) {
    double h = (double)m->hidden, q = (double)(m->heads * (m->head_dim ? m->head_dim : m->hidden / m->heads));
    double attention = 2 * h * h * ((1 + (double)m->kv_heads / (double)m->heads) * (q / h));
    double layer = 2 * h * ((double)m->ffn * (m->no_gate ? 1.0 : 1.5) + 1) + attention;
    double block = layer * (double)m->layers + h, embedding = h * (double)m->vocab;
    double shard = (block / pp + embedding) / tp;
    if (!m->tied && pp < 2) shard += embedding / tp;
    return shard;
}

/* Our count is Megatron's plus the terms that it leaves out: biases of Q, K and V, and norms of Q and K. Norms are not
   divided over tp, and Megatron's block / pp spreads the final norm over the stages. */
TEST(megatron_parameter_formula) {
    int64_t i, tp, pp;
    for (i = 0; i < COUNT(published); i++) {
        const cf_model *m = cf_model_find(published[i].name);
        int64_t dim = m->head_dim, q = m->heads * dim, kv = m->kv_heads * dim;
        for (tp = 1; tp <= 8; tp *= 2) {
            for (pp = 1; pp <= 4; pp *= 2) {
                cf_parallel p = split(tp, pp, 1);
                cf_parameters first;
                double layers = (double)m->layers / (double)pp, ours, left_out;
                if (m->kv_heads % tp != 0 || m->layers % pp != 0 || m->heads % tp != 0 || m->vocab % tp != 0) continue;
                REQUIRE(cf_stage_parameters(m, &p, 0, &first, NULL) == CF_OK);
                ours = (double)first.total;
                left_out = layers * (m->qkv_bias ? (double)(q + 2 * kv) / (double)tp : 0);
                left_out += layers * (m->qk_norm ? 2 * (double)dim : 0);
                left_out += layers * 2 * (double)m->hidden * (1 - 1 / (double)tp);
                left_out += pp == 1 ? (double)m->hidden * (1 - 1 / (double)tp)
                                    : -(double)m->hidden / (double)(pp * tp);
                harness_note("%s tp %d pp %d", m->name, (int)tp, (int)pp);
                CHECK(fabs(ours - left_out - megatron_shard(m, (double)tp, (double)pp)) < 0.01);
            }
        }
    }
}

/* ---- kinds of layers ---- */

/* Parameters as published on model cards and in reports, in billions, with as many digits as given. active: with the
   embedding or not.

   If the numbers of a checkpoint were found, they match: Hugging Face counts them and public lists repeat it; Keras'
   preset has Mixtral 8x7B, and discussion 6 has Mixtral-8x22B-v0.1. Two are adjusted: Llama 4's encoder of images has
   871,932,416, and GLM's checkpoint is INTELLECT-3's, which was trained from Air without prediction layers. Router
   biases, a number for each expert, are no parameters here. Kimi K2 has 3,416 others of unknown origin.

   Published totals count differently: GLM's 355 is with prediction layers and without embedding and head, its 106
   without all of these, Scout's 109 with the encoder, Kimi Linear's 48 without embedding and head, and Qwen3.5-35B's
   with an encoder and a prediction layer. */
static const struct {
    const char *name;
    double total, active;
    double digit; /* of `active` */
    int embedding;
    int64_t checkpoint, biases; /* 0: not found; includes the routers' biases */
} published_kinds[] = {
    {"qwen3-30b-a3b", 30.5, 3.3, 0.1, 1, 30532122624, 0},
    {"qwen3-235b-a22b", 235, 22, 1, 1, 235093634560, 0},
    {"qwen3-coder-480b-a35b", 480, 35, 1, 1, 0, 0},
    {"qwen3-next-80b-a3b", 80, 3, 1, 1, 0, 0},
    {"qwen3.5-27b", 27, 27, 1, 1, 0, 0},
    {"qwen3.5-35b-a3b", 35, 3, 1, 1, 0, 0},
    {"qwen3.5-122b-a10b", 122, 10, 1, 1, 0, 0},
    {"qwen3.5-397b-a17b", 397, 17, 1, 1, 0, 0},
    {"gpt-oss-20b", 20.91, 3.61, 0.01, 0, 20914757184, 0},
    {"gpt-oss-120b", 116.83, 5.13, 0.01, 0, 116829156672, 0},
    {"deepseek-v3", 671, 37, 1, 1, 0, 0},
    {"glm-4.5", 355, 32, 1, 0, 352797829024, 89 * 160},
    {"glm-4.5-air", 106, 12, 1, 0, 106852251264, 45 * 128},
    {"kimi-k2", 1000, 32, 1, 1, 1026408235864, 60 * 384 + 3416},
    {"kimi-linear-48b-a3b", 48, 3, 1, 1, 49122681728, 26 * 256},
    {"llama-4-scout", 109, 17, 1, 1, 108641793536 - 871932416, 0},
    {"llama-4-maverick", 400, 17, 1, 1, 400711848960, 0},
    {"mixtral-8x7b", 46.7, 12.9, 0.1, 1, 46702792704, 0},
    {"mixtral-8x22b", 141, 39, 1, 1, 140620634112, 0},
    {"nemotron-3-nano-30b-a3b", 31.6, 3.5, 0.1, 1, 0, 0},
};

TEST(counts_of_kinds_are_the_published_ones) {
    int64_t i;
    for (i = 0; i < COUNT(published_kinds); i++) {
        const cf_model *model = cf_model_find(published_kinds[i].name);
        double wanted = published_kinds[i].total, digit = published_kinds[i].digit, total, active;
        cf_parameters counted;
        REQUIRE(model != NULL);
        harness_note("%s", published_kinds[i].name);
        REQUIRE(cf_model_parameters(model, &counted, NULL) == CF_OK);
        total = (double)counted.total / 1e9;
        active = (double)(counted.active - (published_kinds[i].embedding ? 0 : counted.embedding)) / 1e9;
        if (published_kinds[i].checkpoint > 0)
            CHECK_INT(counted.total + published_kinds[i].biases, published_kinds[i].checkpoint);
        else CHECK(fabs(total / wanted - 1) < 0.005 || fabs(total - wanted) < 0.5);
        /* Rounded to the last published digit, or cut off after it. */
        CHECK(active > published_kinds[i].active - digit / 2 && active < published_kinds[i].active + digit);
        CHECK_INT(counted.embedding + counted.attention + counted.mlp + counted.norms + counted.head, counted.total);
    }
}

/* Counts the tensors of one layer, named as in transformers' models; a mamba_ssm layer as in Nemotron-H's. */
static int64_t count_mixer_tensors(const cf_model *m, const cf_layer *k) {
    int64_t h = m->hidden, heads = k->heads ? k->heads : m->heads, groups = k->kv_heads ? k->kv_heads : m->kv_heads;
    int64_t dim = k->head_dim ? k->head_dim : m->head_dim, value = k->value_dim ? k->value_dim : dim, sum = 0;
    int64_t keys = groups * dim, values = heads * value;
    switch (k->mixer) {
    case CF_MIXER_FULL:
    case CF_MIXER_WINDOW:
    case CF_MIXER_CHUNKED:
        sum += h * heads * dim * (k->gate ? 2 : 1) + h * groups * dim + h * groups * value + heads * value * h;
        if (m->qkv_bias) sum += heads * dim * (k->gate ? 2 : 1) + groups * dim + groups * value;
        if (m->out_bias) sum += h;
        if (m->qk_norm) sum += dim + dim;
        if (k->sinks) sum += heads;
        return sum;
    case CF_MIXER_LATENT:
        if (k->q_latent) sum += h * k->q_latent + k->q_latent + k->q_latent * heads * dim; /* q_a, its norm, q_b */
        else sum += h * heads * dim;
        sum += h * (k->latent + k->rope_dim) + k->latent;                  /* kv_a_proj_with_mqa, its norm */
        sum += k->latent * heads * (dim - k->rope_dim + value);            /* kv_b_proj */
        return sum + heads * value * h;
    case CF_MIXER_DELTA:
        sum += h * (2 * keys + 2 * values) + h * 2 * heads;                /* in_proj_qkvz, in_proj_ba */
        sum += (2 * keys + values) * k->tail + heads + heads;              /* conv1d, dt_bias, A_log */
        return sum + value + values * h;                                   /* norm, out_proj */
    case CF_MIXER_KDA:
        sum += h * keys + h * keys + h * values + (keys + keys + values) * k->tail; /* q, k, v and their convolutions */
        sum += h * value + value * keys + keys + heads + h * heads;        /* f_a, f_b, dt_bias, A_log, b */
        return sum + h * value + value * values + value + values * h;      /* g_a, g_b, o_norm, o_proj */
    case CF_MIXER_MAMBA2:
        sum += h * (2 * values + 2 * keys + heads);                        /* in_proj: gate, x, B, C, dt */
        sum += (values + 2 * keys) * k->tail + (values + 2 * keys);        /* conv1d and its bias */
        return sum + 3 * heads + values + values * h;                      /* A_log, D, dt_bias, norm, out_proj */
    case CF_MIXER_NONE:
    case CF_MIXER_COUNT: break;
    }
    return 0;
}

static int64_t count_mlp_tensors(const cf_model *m, const cf_layer *k, int dense) {
    int64_t h = m->hidden, matrices = m->no_gate ? 2 : 3, ffn = dense || k->ffn == 0 ? m->ffn : k->ffn, e, sum = 0;
    if (k->no_ffn) return 0;
    if (dense || k->experts == 0) return matrices * h * ffn + (m->mlp_bias ? (matrices - 1) * ffn + h : 0);
    for (e = 0; e < k->experts; e++) {
        sum += matrices * h * ffn + h; /* and its row of the router */
        if (m->mlp_bias) sum += (matrices - 1) * ffn + h + 1;
    }
    if (k->shared) sum += matrices * h * k->shared + (m->mlp_bias ? (matrices - 1) * k->shared + h : 0);
    return sum + (k->shared_gate ? h : 0);
}

static int64_t count_kinds(const cf_model *m) {
    int64_t sum = m->vocab * m->hidden * (m->tied ? 1 : 2) + m->hidden, i;
    for (i = 0; i < m->layers + m->mtp; i++) {
        int64_t layer = i < m->layers ? i : m->layers - 1;
        const cf_layer *k = &m->kinds[m->pattern[layer % (int64_t)strlen(m->pattern)] - 'a'];
        sum += count_mixer_tensors(m, k) + count_mlp_tensors(m, k, layer < m->first_dense);
        sum += m->hidden * (m->norms ? m->norms : (k->mixer != CF_MIXER_NONE) + !k->no_ffn);
    }
    return sum + m->mtp * (2 * m->hidden * m->hidden + 3 * m->hidden);
}

static cf_layer random_kind(harness_rng *rng) {
    cf_layer k = {0};
    k.mixer = (cf_mixer)harness_between(rng, 0, CF_MIXER_COUNT - 1);
    k.gate = (int)harness_between(rng, 0, 1);
    k.sinks = (int)harness_between(rng, 0, 1);
    k.no_ffn = harness_chance(rng, 0.2);
    k.kv_heads = (int64_t)1 << harness_between(rng, 0, 3);
    k.heads = k.kv_heads * harness_between(rng, 1, 4);
    k.head_dim = 8 * harness_between(rng, 2, 8);
    k.value_dim = harness_chance(rng, 0.5) ? 8 * harness_between(rng, 1, 8) : 0;
    if (k.mixer == CF_MIXER_WINDOW || k.mixer == CF_MIXER_CHUNKED) k.window = harness_between(rng, 1, 300);
    if (k.mixer == CF_MIXER_LATENT) {
        k.latent = harness_between(rng, 1, 64);
        k.q_latent = harness_chance(rng, 0.5) ? harness_between(rng, 1, 64) : 0;
        k.rope_dim = 8;
    }
    if (k.mixer >= CF_MIXER_DELTA && k.mixer <= CF_MIXER_MAMBA2) k.tail = harness_between(rng, 1, 5);
    if (harness_chance(rng, 0.5)) return k;
    k.ffn = 8 * harness_between(rng, 1, 50);
    k.experts = 4 * harness_between(rng, 1, 8);
    k.active = harness_between(rng, 1, 4);
    k.shared = harness_chance(rng, 0.5) ? 8 * harness_between(rng, 1, 20) : 0;
    k.shared_gate = (int)harness_between(rng, 0, 1);
    return k;
}

/* Draws a model of up to three kinds. `kinds` and `pattern` are the caller's arrays. */
static cf_model random_kinds(harness_rng *rng, cf_layer *kinds, char *pattern) {
    cf_model m = {0};
    int64_t i, n = harness_between(rng, 1, 6);
    m.layers = harness_between(rng, 3, 20);
    m.hidden = 16 * harness_between(rng, 1, 20);
    m.heads = m.kv_heads = 8;
    m.head_dim = 32;
    m.ffn = 8 * harness_between(rng, 1, 90);
    m.vocab = harness_between(rng, 1, 900);
    m.tied = m.qkv_bias = m.qk_norm = (int)harness_between(rng, 0, 1);
    m.out_bias = m.mlp_bias = m.no_gate = (int)harness_between(rng, 0, 1);
    for (i = 0; i < 3; i++) kinds[i] = random_kind(rng);
    for (i = 0; i < 3; i++)
        if (kinds[i].mixer == CF_MIXER_LATENT || kinds[i].mixer >= CF_MIXER_DELTA) kinds[i].gate = kinds[i].sinks = 0;
    for (i = 0; i < 3; i++)
        if (kinds[i].no_ffn) kinds[i].experts = kinds[i].active = kinds[i].shared = kinds[i].shared_gate = 0;
    for (i = 0; i < n; i++) pattern[i] = (char)('a' + harness_between(rng, 0, 2));
    for (i = 0; i < 3; i++) /* each kind occurs in some layer */
        if (memchr(pattern, (int)('a' + i), (size_t)n) == NULL) pattern[n++] = (char)('a' + i);
    pattern[n] = '\0';
    m.kinds = kinds;
    m.n_kinds = 3;
    m.pattern = pattern;
    m.first_dense = harness_chance(rng, 0.5) ? harness_between(rng, 0, 2) : 0;
    m.mtp = harness_chance(rng, 0.3) ? harness_between(rng, 1, 2) : 0;
    for (i = 0; i < 3; i++)
        if (kinds[i].experts == 0) kinds[i].shared = 0;
    for (i = 0; i < 3; i++)
        if (kinds[i].shared == 0) kinds[i].shared_gate = 0;
    if (kinds[0].experts + kinds[1].experts + kinds[2].experts == 0) m.first_dense = 0;
    for (i = 0; i < 3 && kinds[i].mixer > CF_MIXER_CHUNKED; i++) continue;
    if (i == 3) m.qkv_bias = m.out_bias = m.qk_norm = 0; /* of Q, K and V, which none of the kinds has */
    return m;
}

TEST(counts_of_kinds_are_those_of_the_tensors) {
    harness_rng rng = {23};
    cf_layer kinds[3];
    char pattern[12];
    int64_t i, published_ones = COUNT(published_kinds);
    for (i = 0; i < 400 + published_ones; i++) {
        cf_model m = i < published_ones ? *cf_model_find(published_kinds[i].name) : random_kinds(&rng, kinds, pattern);
        cf_parameters counted;
        cf_error error;
        harness_note("%s", i < published_ones ? m.name : pattern);
        if (cf_model_parameters(&m, &counted, &error) != CF_OK) FAIL("%s", error.text);
        else CHECK_INT(counted.total, count_kinds(&m));
    }
}

/* All stages together have each layer once, and each expert as often as it has copies. */
TEST(stages_of_kinds_add_up) {
    harness_rng rng = {24};
    cf_layer kinds[3];
    char pattern[12];
    int i, checked = 0;
    for (i = 0; i < 600; i++) {
        cf_model m = random_kinds(&rng, kinds, pattern);
        cf_parallel p = split((int64_t)1 << harness_between(&rng, 0, 2), harness_between(&rng, 1, 3), 4);
        int64_t s, k, layers = 0, experts = 0, sum = 0;
        cf_parameters counted, whole;
        cf_shard shard;
        p.ep = (int64_t)1 << harness_between(&rng, 0, 2);
        if (kinds[0].experts + kinds[1].experts + kinds[2].experts == 0) p.ep = 1;
        if (cf_parallel_validate(&m, &p, NULL) != CF_OK) continue;
        checked++;
        REQUIRE(cf_model_parameters(&m, &whole, NULL) == CF_OK);
        for (s = 0; s < p.pp; s++) {
            REQUIRE(cf_stage_parameters(&m, &p, s, &counted, NULL) == CF_OK);
            experts += counted.experts * (p.ep > 1 ? p.ep : p.tp);
            sum += counted.total;
            for (k = 0; cf_stage_shard(&m, &p, s, k, &shard, NULL) == CF_OK; k++) {
                layers += shard.layers;
                CHECK(shard.experts == 0 || shard.experts * p.ep == kinds[k % 3].experts);
            }
            CHECK_INT(k, m.first_dense > 0 ? 6 : 3);
        }
        CHECK_INT(layers, m.layers + m.mtp);
        if (p.tp == 1 && p.ep == 1 && p.pp == 1) CHECK_INT(sum, whole.total);
        if (!m.mlp_bias || p.ep > 1 || p.tp == 1) CHECK_INT(experts, whole.experts);
    }
    CHECK(checked > 100);
}

/* A recurrent layer has as many queries as keys, each with head_dim columns, divided over the GPUs. */
TEST(queries_of_recurrent_layers) {
    const cf_mixer mixers[] = {CF_MIXER_DELTA, CF_MIXER_KDA, CF_MIXER_MAMBA2};
    int64_t i, tp;
    for (i = 0; i < COUNT(mixers); i++)
        for (tp = 1; tp <= 4; tp *= 2) {
            cf_model m = *cf_model_find("qwen3-8b");
            cf_layer kind = {.heads = 32, .kv_heads = 16, .head_dim = 96, .value_dim = 64, .tail = 4};
            cf_parallel p = split(tp, 1, 1);
            cf_shard shard;
            cf_error error;
            kind.mixer = mixers[i];
            if (kind.mixer == CF_MIXER_KDA) kind.kv_heads = 32;
            m.kinds = &kind;
            m.n_kinds = 1;
            m.qk_norm = 0;
            if (cf_stage_shard(&m, &p, 0, 0, &shard, &error) != CF_OK) FAIL("%s", error.text);
            CHECK_INT(shard.q, kind.kv_heads * 96 / tp);
            CHECK_INT(shard.kv, kind.kv_heads * 96 / tp);
            CHECK_INT(shard.out, 32 * 64 / tp);
            CHECK_INT(shard.tail_row, (2 * kind.kv_heads * 96 + 32 * 64) / tp);
            CHECK_INT(shard.tail, 3);
        }
}

TEST(bad_kinds_are_named) {
    static const struct {
        size_t member;
        int64_t value;
        const char *field;
    } cases[] = {
        {offsetof(cf_layer, heads), -1, "kinds.heads"},     {offsetof(cf_layer, kv_heads), 3, "kinds.kv_heads"},
        {offsetof(cf_layer, head_dim), -1, "kinds.head_dim"},
        {offsetof(cf_layer, value_dim), INT64_MAX, "kinds.value_dim"},
        {offsetof(cf_layer, window), 0, "kinds.window"},    {offsetof(cf_layer, latent), -1, "kinds.latent"},
        {offsetof(cf_layer, q_latent), -1, "kinds.q_latent"}, {offsetof(cf_layer, rope_dim), 129, "kinds.rope_dim"},
        {offsetof(cf_layer, tail), -1, "kinds.tail"},       {offsetof(cf_layer, ffn), -1, "kinds.ffn"},
        {offsetof(cf_layer, experts), CF_MAX_EXPERTS + 1, "kinds.experts"},
        {offsetof(cf_layer, active), 9, "kinds.active"},    {offsetof(cf_layer, active), 0, "kinds.active"},
        {offsetof(cf_layer, shared), -1, "kinds.shared"},   {offsetof(cf_layer, reach), 1, "kinds.reach"},
        {offsetof(cf_layer, reach), 9, "kinds.reach"},      {offsetof(cf_layer, reach), -1, "kinds.reach"},
    };
    cf_model model = *cf_model_find("qwen3-8b");
    cf_layer kind = {0};
    cf_error error;
    int64_t i;
    kind.mixer = CF_MIXER_WINDOW;
    kind.window = 128;
    kind.ffn = 64;
    kind.experts = 8;
    kind.active = 2;
    model.kinds = &kind;
    model.n_kinds = 1;
    CHECK_INT(cf_model_validate(&model, &error), CF_OK);
    for (i = 0; i < COUNT(cases); i++) {
        cf_layer other = kind;
        memcpy((char *)&other + cases[i].member, &cases[i].value, sizeof cases[i].value);
        model.kinds = &other;
        CHECK_INT(cf_model_validate(&model, &error), CF_ERROR_ARGUMENT);
        CHECK_STR(error.field, cases[i].field);
        CHECK_INT(error.item, 0);
        CHECK_INT(error.got, cases[i].value);
    }
    model.kinds = &kind;
    model.pattern = "ab";
    CHECK_INT(cf_model_validate(&model, &error), CF_ERROR_ARGUMENT);
    CHECK_STR(error.field, "model.pattern");
    CHECK_INT(error.item, 1);
    model.pattern = "";
    CHECK_INT(cf_model_validate(&model, &error), CF_ERROR_ARGUMENT);
    model.pattern = NULL;
    model.n_kinds = 0;
    CHECK_INT(cf_model_validate(&model, &error), CF_ERROR_ARGUMENT);
    CHECK_STR(error.field, "model.n_kinds");
    model.n_kinds = 1;
    {
        cf_parallel p = split(1, 1, 8);
        p.ep = 3;
        CHECK_INT(cf_parallel_validate(&model, &p, &error), CF_ERROR_ARGUMENT);
        CHECK_STR(error.field, "parallel.ep");
        CHECK_INT(error.wanted, 2);
        kind.experts = 12;
        p.ep = 8;
        CHECK_INT(cf_parallel_validate(&model, &p, &error), CF_ERROR_ARGUMENT);
        CHECK_INT(error.wanted, 4); /* 6 divides the experts, but not the 8 GPUs */
        p.ep = (int)error.wanted;
        CHECK_INT(cf_parallel_validate(&model, &p, &error), CF_OK);
        p.imbalance = -1;
        CHECK_INT(cf_parallel_validate(&model, &p, &error), CF_ERROR_ARGUMENT);
        CHECK_STR(error.field, "parallel.imbalance");
    }
}

/* ---- nonsense ---- */

typedef struct bad_model {
    size_t member;
    int64_t value;
    const char *field;
    int64_t wanted;
    cf_result code;
} bad_model;

TEST(bad_models_are_named) {
    static const bad_model cases[] = {
        {offsetof(cf_model, layers), 0, "model.layers", 1, CF_ERROR_ARGUMENT},
        {offsetof(cf_model, layers), -28, "model.layers", 1, CF_ERROR_ARGUMENT},
        {offsetof(cf_model, layers), INT64_MAX, "model.layers", CF_MAX_LAYERS, CF_ERROR_LIMIT},
        {offsetof(cf_model, hidden), 0, "model.hidden", 1, CF_ERROR_ARGUMENT},
        {offsetof(cf_model, hidden), INT64_MAX, "model.hidden", CF_MAX_WIDTH, CF_ERROR_LIMIT},
        {offsetof(cf_model, heads), 0, "model.heads", 1, CF_ERROR_ARGUMENT},
        {offsetof(cf_model, heads), INT64_MIN, "model.heads", 1, CF_ERROR_ARGUMENT},
        {offsetof(cf_model, kv_heads), 0, "model.kv_heads", 1, CF_ERROR_ARGUMENT},
        {offsetof(cf_model, kv_heads), 29, "model.kv_heads", 28, CF_ERROR_ARGUMENT},
        {offsetof(cf_model, kv_heads), 5, "model.kv_heads", 4, CF_ERROR_ARGUMENT},
        {offsetof(cf_model, head_dim), -1, "model.head_dim", 0, CF_ERROR_ARGUMENT},
        {offsetof(cf_model, head_dim), INT64_MAX, "model.head_dim", CF_MAX_WIDTH / 28, CF_ERROR_LIMIT},
        {offsetof(cf_model, ffn), 0, "model.ffn", 1, CF_ERROR_ARGUMENT},
        {offsetof(cf_model, ffn), INT64_MAX, "model.ffn", CF_MAX_FFN, CF_ERROR_LIMIT},
        {offsetof(cf_model, vocab), -5, "model.vocab", 1, CF_ERROR_ARGUMENT},
        {offsetof(cf_model, vocab), INT64_MAX, "model.vocab", CF_MAX_VOCAB, CF_ERROR_LIMIT},
    };
    int64_t i;
    for (i = 0; i < COUNT(cases); i++) {
        cf_model model = *cf_model_find("qwen2.5-7b");
        cf_parameters out;
        cf_error error;
        memcpy((char *)&model + cases[i].member, &cases[i].value, sizeof cases[i].value);
        harness_poison(&out, sizeof out);
        CHECK_INT(cf_model_parameters(&model, &out, &error), cases[i].code);
        CHECK_STR(error.field, cases[i].field);
        CHECK_INT(error.wanted, cases[i].wanted);
        CHECK_INT(error.got, cases[i].value);
        CHECK_POISON(&out, sizeof out);
    }
    {
        cf_model model = *cf_model_find("qwen2.5-7b");
        cf_error error;
        model.head_dim = 0;
        CHECK_INT(cf_model_validate(&model, NULL), CF_OK); /* 3584 / 28 */
        model.heads = 30;
        model.kv_heads = 2;
        CHECK_INT(cf_model_validate(&model, &error), CF_ERROR_ARGUMENT);
        CHECK_STR(error.field, "model.heads");
        CHECK_INT(error.wanted, 28);
        model.kv_heads = 3;
        model.hidden = 96;
        CHECK_INT(cf_model_validate(&model, &error), CF_ERROR_ARGUMENT);
        CHECK_INT(error.wanted, 24); /* 16 and 32 are nearer, but not multiples of 3 */
        model.heads = 24;
        CHECK_INT(cf_model_validate(&model, &error), CF_OK);
        model.heads = model.kv_heads = 5;
        CHECK_INT(cf_model_validate(&model, &error), CF_ERROR_ARGUMENT);
        CHECK_STR(error.field, "model.head_dim");
        CHECK_INT(cf_model_validate(NULL, &error), CF_ERROR_ARGUMENT);
    }
}

/* The largest allowed sizes are counted without overflow, or refused. */
TEST(huge_models_do_not_overflow) {
    cf_model model = *cf_model_find("qwen2.5-7b");
    cf_parameters out;
    cf_error error;
    model.layers = CF_MAX_LAYERS;
    model.hidden = CF_MAX_WIDTH;
    model.heads = model.kv_heads = CF_MAX_WIDTH;
    model.head_dim = 1;
    model.ffn = CF_MAX_FFN;
    model.vocab = CF_MAX_VOCAB;
    harness_poison(&out, sizeof out);
    CHECK_INT(cf_model_parameters(&model, &out, &error), CF_ERROR_OVERFLOW);
    CHECK_STR(error.field, "parameters");
    CHECK_POISON(&out, sizeof out);
    model.layers = 100;
    REQUIRE(cf_model_parameters(&model, &out, NULL) == CF_OK);
    CHECK_INT(out.mlp, 100 * 3 * CF_MAX_WIDTH * CF_MAX_FFN);
}

typedef struct bad_split {
    size_t member;
    int64_t value;
    const char *field;
    int64_t wanted;
} bad_split;

TEST(bad_splits_are_named) {
    static const bad_split cases[] = { /* of qwen2.5-7b: 28 heads, 4 K heads, 28 layers, ffn 18944 */
        {offsetof(cf_parallel, tp), -1, "parallel.tp", 1},
        {offsetof(cf_parallel, tp), 3, "parallel.tp", 2},
        {offsetof(cf_parallel, tp), 8, "parallel.tp", 4},
        {offsetof(cf_parallel, tp), 27, "parallel.tp", 4},
        {offsetof(cf_parallel, tp), 1000, "parallel.tp", 4}, /* 28 divides the heads, but not the MLP */
        {offsetof(cf_parallel, pp), -4, "parallel.pp", 1},
        {offsetof(cf_parallel, pp), 29, "parallel.pp", 28},
        {offsetof(cf_parallel, n_virtual), 29, "parallel.n_virtual", 28},
        {offsetof(cf_parallel, dp), -2, "parallel.dp", 1},
        {offsetof(cf_parallel, zero), 4, "parallel.zero", 3},
        {offsetof(cf_parallel, zero), -1, "parallel.zero", 0},
        {offsetof(cf_parallel, vocab_multiple), -128, "parallel.vocab_multiple", 1},
    };
    const cf_model *model = cf_model_find("qwen2.5-7b");
    cf_error error;
    int64_t i;
    for (i = 0; i < COUNT(cases); i++) {
        cf_parallel p = split(1, 1, 1);
        memcpy((char *)&p + cases[i].member, &cases[i].value, sizeof cases[i].value);
        CHECK_INT(cf_parallel_validate(model, &p, &error), CF_ERROR_ARGUMENT);
        CHECK_STR(error.field, cases[i].field);
        CHECK_INT(error.wanted, cases[i].wanted);
        CHECK_INT(error.got, cases[i].value);
        memcpy((char *)&p + cases[i].member, &cases[i].wanted, sizeof cases[i].wanted);
        CHECK_INT(cf_parallel_validate(model, &p, NULL), CF_OK); /* the nearest one does */
    }
    {
        cf_parallel p = split(1, 1, 1);
        p.recompute = CF_RECOMPUTE_COUNT;
        CHECK_INT(cf_parallel_validate(model, &p, &error), CF_ERROR_ARGUMENT);
        CHECK_STR(error.field, "parallel.recompute");
        CHECK_INT(cf_parallel_validate(model, NULL, &error), CF_ERROR_ARGUMENT);
        CHECK_INT(cf_parallel_validate(NULL, &p, &error), CF_ERROR_ARGUMENT);
    }
    CHECK_STR(cf_recompute_name(CF_RECOMPUTE_FULL), "full");
    CHECK_STR(cf_recompute_name(CF_RECOMPUTE_COUNT), "?");
}

/* ---- estimates ---- */

/* Returns a GPU on which only FLOPs cost time: 1 FLOP/s. */
static cf_gpu only_flops(void) {
    cf_gpu gpu = {0};
    gpu.name = "flops";
    gpu.flops = gpu.gemm = gpu.attention_forward = gpu.attention_backward = gpu.link = 1;
    gpu.bandwidth = gpu.nvlink = gpu.network = gpu.pcie = 1e300;
    gpu.processors = 1;
    return gpu;
}

static int near(double got, double wanted, double relative) {
    return fabs(got - wanted) <= relative * fabs(wanted);
}

/* Returns the cost of a model on one GPU of a split without pipeline: the forward and the gradients. */
static cf_stage_cost cost_of_model(const cf_model *model, const cf_gpu *gpu, cf_parallel parallel, int64_t chunk_size) {
    cf_stage_cost stage = {{0, 0, 0}, {0, 0, 0}, {0, 0, 0}, {0, 0, 0}, {0, 0, 0}};
    cf_cost_desc desc = {0};
    cf_timing timing;
    cf_error error;
    desc.model = model;
    desc.gpu = gpu;
    desc.parallel = parallel;
    desc.chunk_size = chunk_size;
    if (cf_cost_estimate(&desc, &stage, 1, &timing, NULL, &error) != CF_OK) FAIL("%s", error.text);
    return stage;
}

/* The same for a model of the table, on one GPU or one of dp = ep GPUs. */
static cf_stage_cost cost_of(const char *name, const cf_gpu *gpu, int64_t ep, int64_t imbalance, int64_t chunk_size) {
    cf_parallel parallel = split(1, 1, ep);
    parallel.ep = ep;
    parallel.imbalance = imbalance;
    return cost_of_model(cf_model_find(name), gpu, parallel, chunk_size);
}

/* A token costs the FLOPs of its active weights, wherever they are. A pair costs those of the layers that see all of a
   prefix. */
TEST(estimates_count_the_flops_of_kinds) {
    cf_gpu gpu = only_flops();
    cf_stage_cost cost = cost_of("qwen3-30b-a3b", &gpu, 1, 0, 0), spread = cost_of("qwen3-30b-a3b", &gpu, 8, 0, 0);
    cf_stage_cost uneven = cost_of("qwen3-30b-a3b", &gpu, 8, 25, 0);
    double experts = 48.0 * 8 * 3 * 2048 * 768, head = 2048.0 * 151936, window = 127, expand;
    double weights = experts + 48.0 * (2048 * (2 * 4096 + 2 * 512) + 2048 * 128) + head;
    CHECK(near(cost.forward.per_token, 2 * weights, 1e-12) && near(cost.weight.per_token, 2 * weights, 1e-12));
    CHECK(near(cost.forward.per_pair, 4.0 * 48 * 4096, 1e-12) && near(cost.input.per_pair, 10.0 * 48 * 4096, 1e-12));
    CHECK(near(spread.forward.per_token, 2 * weights, 1e-12));
    CHECK(near(uneven.forward.per_token, 2 * (weights + experts / 4), 1e-12));
    cost = cost_of("deepseek-v3", &gpu, 1, 0, 0); /* heads of 192 and 128 */
    CHECK(near(cost.forward.per_pair, 4.0 * 61 * 128 * 160, 1e-12));
    expand = 61.0 * 512 * 128 * (128 + 128) / 4096; /* every chunk recomputes K and V of its whole prefix */
    gpu.processors = 1;
    cost = cost_of("deepseek-v3", &gpu, 1, 0, 4096);
    CHECK(near(cost.input.per_pair, 10.0 * 61 * 128 * 160 + 4 * expand, 1e-12));
    CHECK(near(cost.weight.per_pair, 2 * expand, 1e-12));
    cost = cost_of("gpt-oss-20b", &gpu, 1, 0, 0);
    CHECK(near(cost.forward.per_pair, 4.0 * 12 * 4096, 1e-12)); /* the other twelve layers see 128 rows each */
    window = cost.input.per_token - cost.forward.per_token;
    CHECK(near(window, (10.0 - 4.0) * 12 * 4096 * 128, 1e-9));
    /* an exponential takes as long as 64 columns in forward and 25.6 in backward; heads of 64 */
    gpu.flops = 256 * 28.8e9;
    cost = cost_of("llama-3.2-1b", &gpu, 1, 0, 0);
    CHECK(near(cost.forward.per_pair * gpu.flops, 4.0 * 16 * 32 * 128 * (64 + 64) / (128 + 64), 1e-12));
    CHECK(near(cost.input.per_pair * gpu.flops, 10.0 * 16 * 32 * 128 * (64 + 25.6) / (128 + 25.6), 1e-12));
    gpu.flops = 1;
    cost = cost_of("qwen3.5-27b", &gpu, 1, 0, 0);
    CHECK(near(cost.forward.per_pair, 4.0 * 16 * 24 * 256, 1e-12));
    window = cost.input.per_token - cost.forward.per_token; /* 1.5 x 48 layers of 48 heads, 128 x 128 in blocks of 64 */
    CHECK(near(window, 1.5 * 48 * 48 * (6.0 * 128 * 128 + 128.0 * (3 * 128 + 2 * 128)), 1e-9));
}

/* Rows go to their experts and back in forward, and their gradients in backward. A replay costs as much as a forward.
   Weights that no token uses are read all the same. */
TEST(experts_send_and_are_read) {
    cf_gpu gpu = only_flops();
    cf_stage_cost cost, without;
    cf_cost_desc fixed = {0};
    cf_timing timing;
    cf_model bare;
    gpu.flops = 1e300;
    gpu.nvlink = 100;
    gpu.network = 10;
    cost = cost_of("qwen3-30b-a3b", &gpu, 8, 0, 0);
    /* A copy goes to each of the other seven GPUs that one of eight choices out of eight hits, and back. */
    CHECK(near(cost.forward.per_token, 48.0 * 2 * 2048 * 2 * 7 * (1 - pow(7.0 / 8, 8)) / 100, 1e-12));
    CHECK(near(cost.input.per_token, cost.forward.per_token, 1e-12) && cost.weight.per_token < 1e-9);
    CHECK(near(cost.replay.per_token, cost.forward.per_token, 1e-12));
    /* two nodes: one copy to the other node, if one of the choices is there */
    cost = cost_of("qwen3-30b-a3b", &gpu, 16, 0, 0);
    CHECK(near(cost.forward.per_token, 48.0 * 2 * 2048 * 2 * (1 - pow(0.5, 8)) / 10, 1e-12));
    gpu.network = 99;
    cost = cost_of("qwen3-30b-a3b", &gpu, 16, 0, 0); /* forwarding between the GPUs of a node takes longer */
    CHECK(near(cost.forward.per_token, 48.0 * 2 * 2048 * 2 * 15 * (1 - pow(15.0 / 16, 8)) / 100, 1e-12));
    gpu.nvlink = 1e9;
    /* eight choices among the four of eight nodes that have its groups */
    cost = cost_of("deepseek-v3", &gpu, 64, 0, 0);
    CHECK(near(cost.forward.per_token, 58.0 * 2 * 7168 * 2 * 7 * 0.5 * (1 - pow(3.0 / 4, 8)) / 99, 1e-12));
    cost = cost_of("kimi-k2", &gpu, 64, 0, 0); /* which has no groups */
    CHECK(near(cost.forward.per_token, 60.0 * 2 * 7168 * 2 * 7 * (1 - pow(7.0 / 8, 8)) / 99, 1e-12));
    gpu = only_flops();
    gpu.flops = 1e300;
    gpu.bandwidth = 1;
    cost = cost_of("gpt-oss-20b", &gpu, 1, 0, 0);
    bare = *cf_model_find("gpt-oss-20b");
    bare.mlp_bias = 0;
    without = cost_of_model(&bare, &gpu, split(1, 1, 1), 0);
    /* Forward: bias times weight in fp32, sum with the output, join, cast; clamp of both halves, join. Backward:
       gradient of the cast and its split; bias and weight, two products and two sums; clamps, joins. */
    CHECK(near(cost.forward.per_token + cost.input.per_token - without.forward.per_token - without.input.per_token,
               24.0 * 4 * 2880 * ((4 + (2 + 4 + 4) + 8 + (4 + 2)) + 2 * 8 + (6 + 6 + 4 + 2 * 12) + 2 * (6 + 4)), 1e-6));
    bare.mlp_bias = 0;
    fixed.model = &bare;
    fixed.gpu = &gpu;
    fixed.unfused = 1; /* two norms of 36 bytes instead of 4, SwiGLU of 10 instead of 6, rotation of 20 instead of 4 */
    REQUIRE(cf_cost_estimate(&fixed, &cost, 1, &timing, NULL, NULL) == CF_OK);
    CHECK(near(cost.forward.per_token - without.forward.per_token,
               24.0 * (2 * 32 * 2880 + 4 * 4 * 2880 + 16 * 64 * (64 + 8)), 1e-9));
    CHECK(near(cost.input.per_token - without.input.per_token,
               2 * (cost.forward.per_token - without.forward.per_token), 1e-9));
    gpu.bandwidth = 1e300;
    gpu.launch = 1;
    cost = cost_of("gpt-oss-20b", &gpu, 1, 0, 0); /* per expert: two products, a bias of two kernels, six in backward */
    CHECK(near(cost.forward.constant, 24 * (12 + 6 + 32 * 4) + 6, 1e-12));
    CHECK(near(cost.input.constant, 24 * (14 + 6 + 32 * 8) + 6, 1e-12));
    CHECK(near(cost_of("qwen3-30b-a3b", &gpu, 8, 0, 0).weight.constant, 48 * (7 + 6 + 16 * 2) + 6, 1e-12));
    gpu.launch = 0;
    gpu.bandwidth = 1;
    cost = cost_of("mixtral-8x7b", &gpu, 1, 0, 0);
    CHECK(near(cost.forward.constant, 2.0 * (32 * (4096.0 * (2 * 4096 + 2 * 1024) + 4096 * 8 + 8 * 3 * 4096.0 * 14336) +
                                             4096.0 * 32000), 1e-12));
}

/* Over all stages and GPUs, the seconds of that GPU are the model's FLOPs: 2 per matrix weight in forward, 4 in
   backward; 4 q per pair and layer in forward, 10 in backward. */
TEST(estimates_count_the_flops) {
    cf_gpu gpu = only_flops();
    int64_t i, tp, pp, s;
    for (i = 0; i < COUNT(published); i++) {
        const cf_model *m = cf_model_find(published[i].name);
        for (tp = 1; tp <= 4; tp *= 2) {
            for (pp = 1; pp <= 3; pp++) {
                cf_stage_cost stages[3];
                cf_timing timing;
                cf_cost_desc desc = {0};
                cf_pass_cost f = {0, 0, 0}, b = {0, 0, 0};
                double weights, pairs, i_and_w;
                desc.model = m;
                desc.gpu = &gpu;
                desc.parallel = split(tp, pp, 1);
                if (cf_parallel_validate(m, &desc.parallel, NULL) != CF_OK) continue;
                REQUIRE(cf_cost_estimate(&desc, stages, pp, &timing, NULL, NULL) == CF_OK);
                for (s = 0; s < pp; s++) {
                    f.per_token += stages[s].forward.per_token * (double)tp;
                    f.per_pair += stages[s].forward.per_pair * (double)tp;
                    b.per_token += stages[s].backward.per_token * (double)tp;
                    b.per_pair += stages[s].backward.per_pair * (double)tp;
                    CHECK(stages[s].forward.constant < 1e-200);
                    i_and_w = stages[s].input.per_token + stages[s].weight.per_token;
                    CHECK(near(i_and_w, stages[s].backward.per_token, 0));
                    CHECK(near(stages[s].input.per_pair, stages[s].backward.per_pair, 0));
                    CHECK(stages[s].weight.per_pair < 1e-200);
                }
                weights = (double)(m->layers * m->hidden * (2 * m->heads + 2 * m->kv_heads) * m->head_dim +
                                   m->layers * 3 * m->hidden * m->ffn + m->hidden * m->vocab);
                pairs = (double)(m->layers * m->heads * m->head_dim);
                harness_note("%s tp %d pp %d", m->name, (int)tp, (int)pp);
                CHECK(near(f.per_token, 2 * weights, 1e-12) || tp > m->kv_heads);
                CHECK(near(b.per_token, 4 * weights, 1e-12) || tp > m->kv_heads);
                CHECK(near(f.per_pair, 4 * pairs, 1e-12));
                CHECK(near(b.per_pair, 10 * pairs, 1e-12));
                CHECK(timing.stages == stages);
            }
        }
    }
}

TEST(recompute_adds_a_forward) {
    cf_gpu gpu = only_flops();
    cf_stage_cost none[2], selective[2], full[2];
    cf_timing timing;
    cf_cost_desc desc = {0};
    desc.model = cf_model_find("qwen3-8b");
    desc.gpu = &gpu;
    desc.parallel = split(2, 2, 1);
    REQUIRE(cf_cost_estimate(&desc, none, 2, &timing, NULL, NULL) == CF_OK);
    desc.parallel.recompute = CF_RECOMPUTE_SELECTIVE;
    REQUIRE(cf_cost_estimate(&desc, selective, 2, &timing, NULL, NULL) == CF_OK);
    desc.parallel.recompute = CF_RECOMPUTE_FULL;
    REQUIRE(cf_cost_estimate(&desc, full, 2, &timing, NULL, NULL) == CF_OK);
    CHECK(near(selective[0].backward.per_pair, none[0].backward.per_pair + none[0].forward.per_pair, 1e-12));
    CHECK(near(selective[0].backward.per_token, none[0].backward.per_token, 0));
    CHECK(near(full[0].backward.per_pair, none[0].backward.per_pair + none[0].forward.per_pair, 1e-12));
    CHECK(near(full[0].backward.per_token, none[0].backward.per_token + none[0].forward.per_token, 1e-12));
    /* the last stage does not recompute its head */
    CHECK(near(full[1].backward.per_token, none[1].backward.per_token + none[0].forward.per_token, 1e-12));
    CHECK(near(full[1].forward.per_token, none[1].forward.per_token, 0));
}

/* Recomputed modules add to backward, term by term: the MLP its 2 FLOPs a weight and half of the collectives; norms and
   the activation their memory traffic; and each its kernels. Layers without recomputation add none of these. */
TEST(modules_add_what_they_run_again) {
    cf_gpu flops = only_flops(), bytes = only_flops();
    const double h = 4096, f = 12288, layers = 18, tp = 2;
    cf_stage_cost none[2], again[2];
    cf_timing timing;
    cf_cost_desc desc = {0};
    bytes.flops = 1e300;
    bytes.bandwidth = 1;
    bytes.nvlink = 1;
    desc.model = cf_model_find("qwen3-8b");
    desc.gpu = &flops;
    desc.parallel = split(2, 2, 1);
    REQUIRE(cf_cost_estimate(&desc, none, 2, &timing, NULL, NULL) == CF_OK);
    desc.parallel.recompute = CF_RECOMPUTE_MLP;
    REQUIRE(cf_cost_estimate(&desc, again, 2, &timing, NULL, NULL) == CF_OK);
    CHECK(near(again[0].backward.per_token - none[0].backward.per_token, 2 * layers * 3 * h * f / tp, 1e-12));
    CHECK(near(again[0].backward.per_pair, none[0].backward.per_pair, 0));
    desc.parallel.recompute_layers = 6;
    REQUIRE(cf_cost_estimate(&desc, again, 2, &timing, NULL, NULL) == CF_OK);
    CHECK(near(again[0].backward.per_token - none[0].backward.per_token, 2 * 6 * 3 * h * f / tp, 1e-12));
    CHECK(near(again[0].forward.per_token, none[0].forward.per_token, 0));
    desc.parallel.recompute_layers = 0;
    desc.parallel.recompute = CF_RECOMPUTE_NONE;
    desc.gpu = &bytes;
    REQUIRE(cf_cost_estimate(&desc, none, 2, &timing, NULL, NULL) == CF_OK);
    desc.parallel.recompute = CF_RECOMPUTE_LAYERNORM;
    REQUIRE(cf_cost_estimate(&desc, again, 2, &timing, NULL, NULL) == CF_OK);
    CHECK(near(again[1].backward.per_token - none[1].backward.per_token, layers * 8 * h / tp, 1e-9));
    desc.parallel.recompute = CF_RECOMPUTE_ACT;
    REQUIRE(cf_cost_estimate(&desc, again, 2, &timing, NULL, NULL) == CF_OK);
    CHECK(near(again[1].input.per_token - none[1].input.per_token, layers * (8 * h + 6 * f) / tp, 1e-9));
    CHECK(near(again[1].weight.per_token, none[1].weight.per_token, 0));
    desc.parallel.recompute = CF_RECOMPUTE_MLP; /* besides the memory traffic, a gather and a scatter of half a row */
    REQUIRE(cf_cost_estimate(&desc, again, 2, &timing, NULL, NULL) == CF_OK);
    CHECK(near(again[1].input.per_token - none[1].input.per_token, layers * ((8 * h + 6 * f) / tp + 2 * h), 1e-9));
    CHECK(near(again[1].input.constant - none[1].input.constant, layers * 2 * 3 * h * f / tp, 1e-9));
}

/* Transfers, by hand: 7B in bf16, tp 4 with sequence parallelism. */
TEST(transfers_use_the_right_link) {
    const cf_gpu *gpu = cf_gpu_find("a100-80g");
    cf_stage_cost stages[4];
    cf_timing timing;
    cf_cost_desc desc = {0};
    double step;
    desc.model = cf_model_find("qwen2.5-7b");
    desc.gpu = gpu;
    desc.parallel = split(4, 4, 1);
    REQUIRE(cf_cost_estimate(&desc, stages, 4, &timing, &step, NULL) == CF_OK);
    CHECK(near(timing.seconds_per_token, 2 * 3584 / 4.0 / (25e9 * 0.75), 1e-12)); /* 16 GPUs: over the network */
    CHECK(near(timing.latency, gpu->latency, 0));
    CHECK(step > 0);
    desc.parallel.no_sequence = 1;
    desc.gpus_per_node = 16;
    REQUIRE(cf_cost_estimate(&desc, stages, 4, &timing, &step, NULL) == CF_OK);
    CHECK(near(timing.seconds_per_token, 2 * 3584 / (300e9 * 0.75), 1e-12));
}

/* ZeRO 2 and 3 by hand: 7B on four stages and eight ranks, with links of 1 GB/s. Long passes hide all transfers except
   one layer's bytes of a gather (2 bytes a parameter) and of a scatter (4). A pass that takes no time hides nothing. An
   iteration of one chunk then sends three times the parameters, where ZeRO 1 sends them twice. */
TEST(zero_2_and_3_send_in_every_pass) {
    cf_gpu gpu = only_flops();
    cf_stage_cost cost[4][4];
    cf_timing timing;
    cf_parameters counted;
    cf_cost_desc desc = {0};
    double step[4], all, slow;
    int64_t zero, round;
    desc.model = cf_model_find("qwen2.5-7b");
    desc.gpu = &gpu;
    gpu.nvlink = gpu.network = 1e9;
    for (round = 0; round < 2; round++) {
        desc.chunk_size = round ? 4096 : 0;
        if (round) gpu.flops = 1e300;
        desc.parallel = split(1, 4, 8);
        for (zero = 0; zero <= 3; zero++) {
            desc.parallel.zero = zero;
            REQUIRE(cf_cost_estimate(&desc, cost[zero], 4, &timing, &step[zero], NULL) == CF_OK);
        }
        REQUIRE(cf_stage_parameters(desc.model, &desc.parallel, 1, &counted, NULL) == CF_OK);
        all = (double)counted.total * 7 / 8 / 1e9;
        slow = round ? 1 : 1 / 7.0; /* of seven layers */
        CHECK(near(cost[2][1].forward.constant, cost[1][1].forward.constant, 0));
        CHECK(near(cost[2][1].backward.constant - cost[1][1].backward.constant, 4 * all * slow, 1e-9));
        CHECK(near(cost[3][1].forward.constant - cost[1][1].forward.constant, 2 * all * slow, 1e-9));
        CHECK(near(cost[3][1].replay.constant, cost[3][1].forward.constant, 0));
        CHECK(near(cost[3][1].input.constant - cost[1][1].input.constant, 2 * all * slow, 1e-9));
        CHECK(near(cost[3][1].weight.constant, cost[2][1].weight.constant, 0));
        CHECK(near(cost[3][1].backward.per_token, cost[1][1].backward.per_token, 0));
    }
    REQUIRE(cf_stage_parameters(desc.model, &desc.parallel, 3, &counted, NULL) == CF_OK); /* the largest: head, norm */
    all = (double)counted.total * 7 / 8 / 1e9;
    CHECK(near(step[0], 8 * all, 1e-6) && near(step[1], 6 * all, 1e-6) && near(step[2], 2 * all, 1e-6));
    CHECK(step[3] < 1e-6 * step[2]);
    desc.model = cf_model_find("qwen3-30b-a3b"); /* each expert is on one GPU of eight, so none of it is sent */
    desc.parallel = split(1, 1, 8);
    desc.parallel.ep = 8;
    desc.chunk_size = 0;
    for (zero = 1; zero <= 3; zero++) {
        desc.parallel.zero = zero;
        REQUIRE(cf_cost_estimate(&desc, cost[zero], 1, &timing, NULL, NULL) == CF_OK);
    }
    REQUIRE(cf_stage_parameters(desc.model, &desc.parallel, 0, &counted, NULL) == CF_OK);
    all = (double)(counted.total - counted.experts) * 7 / 8 / 1e9 / 48;
    CHECK(near(cost[3][0].forward.constant - cost[1][0].forward.constant, 2 * all, 1e-9));
    CHECK(near(cost[2][0].weight.constant - cost[1][0].weight.constant, 4 * all, 1e-9));
}

/* Data-parallel ranks of a node share its ports. If tensor parallelism takes half of each node, two ranks send at the
   same time, limited by NVLink. */
TEST(ranks_of_a_node_send_side_by_side) {
    cf_gpu gpu = only_flops();
    cf_stage_cost cost[1];
    cf_timing timing;
    cf_parameters counted;
    cf_cost_desc desc = {0};
    double step;
    int64_t tp;
    desc.model = cf_model_find("qwen2.5-7b");
    desc.gpu = &gpu;
    gpu.nvlink = 3e9;
    gpu.network = 1e9;
    for (tp = 1; tp <= 4; tp *= 2) {
        desc.parallel = split(tp, 1, 16);
        REQUIRE(cf_cost_estimate(&desc, cost, 1, &timing, &step, NULL) == CF_OK);
        REQUIRE(cf_stage_parameters(desc.model, &desc.parallel, 0, &counted, NULL) == CF_OK);
        CHECK(near(step, 8 * (double)counted.total * 15 / 16 / (tp == 4 ? 2e9 : 3e9), 1e-6));
    }
}

/* A token of the prefix, 7B on four GPUs and four stages: 128 numbers of K and 128 of V in 7 layers. In backward, four
   bytes of each gradient go there and back. */
TEST(streams_cross_the_link_to_the_host) {
    cf_gpu gpu = *cf_gpu_find("h100-80g");
    cf_stage_cost stages[4], same[4];
    cf_timing timing, without;
    cf_cost_desc desc = {0};
    desc.model = cf_model_find("qwen2.5-7b");
    gpu.pcie = 55e9 / gpu.link;
    desc.gpu = &gpu;
    desc.parallel = split(4, 4, 1);
    REQUIRE(cf_cost_estimate(&desc, same, 4, &without, NULL, NULL) == CF_OK);
    desc.stream = 1;
    REQUIRE(cf_cost_estimate(&desc, stages, 4, &timing, NULL, NULL) == CF_OK);
    CHECK(near(timing.stream_forward, 7 * 512 / 55e9, 1e-12)); /* 17 ms for 248K tokens */
    CHECK(near(timing.stream_backward, 7 * (512 + 2 * 1024) / 55e9, 1e-12));
    CHECK(near(timing.stream_exposed, 1 / 7.0, 1e-12));
    CHECK(near(without.stream_forward + without.stream_backward + without.stream_exposed, 0, 0));
    CHECK(memcmp(stages, same, sizeof same) == 0);
}

/* A replay with outputs saves the pairs, the rows of windows and one kernel a layer, in layers that keep outputs. ZeRO
   3's gathers have less compute to hide behind. All other costs stay. */
TEST(replays_with_outputs_do_not_attend) {
    static const struct {
        cf_layer kind;
        int keeps;
    } kinds[] = {{{.mixer = CF_MIXER_FULL}, 1},
                 {{.mixer = CF_MIXER_WINDOW, .window = 4096}, 1},
                 {{.mixer = CF_MIXER_WINDOW, .window = 512}, 0},
                 {{.mixer = CF_MIXER_LATENT, .latent = 512, .rope_dim = 64}, 1},
                 {{.mixer = CF_MIXER_DELTA, .tail = 4}, 0}};
    cf_gpu gpu = *cf_gpu_find("h100-80g");
    int64_t i, zero;
    gpu.launch = 1e-5;
    for (i = 0; i < COUNT(kinds); i++)
        for (zero = 0; zero <= 3; zero += 3) {
            cf_model model = *cf_model_find("qwen2.5-7b");
            cf_stage_cost with[1], without[1], expected;
            cf_timing timing, before;
            cf_cost_desc desc = {0};
            double window = kinds[i].keeps && kinds[i].kind.window > 0 ? 4 * 28 * 4096.0 * 3584 : 0;
            model.kinds = &kinds[i].kind;
            model.n_kinds = 1;
            model.qkv_bias = kinds[i].kind.mixer <= CF_MIXER_CHUNKED;
            desc.model = &model;
            desc.gpu = &gpu;
            desc.stream = 1;
            desc.parallel = split(1, 1, zero > 0 ? 8 : 1);
            desc.parallel.zero = zero;
            REQUIRE(cf_cost_estimate(&desc, without, 1, &before, NULL, NULL) == CF_OK);
            CHECK(memcmp(&without->forward, &without->replay, sizeof without->forward) == 0);
            desc.outputs = 1;
            REQUIRE(cf_cost_estimate(&desc, with, 1, &timing, NULL, NULL) == CF_OK);
            expected = *without;
            expected.replay = with->replay;
            CHECK(memcmp(with, &expected, sizeof expected) == 0);
            CHECK(near(timing.stream_forward, before.stream_forward, 0));
            CHECK(near(with->replay.per_pair, kinds[i].keeps ? 0 : with->forward.per_pair, 0));
            CHECK(near(with->forward.per_token - with->replay.per_token,
                       window / gpu.flops / gpu.attention_forward, window > 0 ? 1e-9 : 0));
            CHECK(near(with->forward.constant - with->replay.constant, kinds[i].keeps ? 28 * 1e-5 : 0, 1e-9));
        }
}

/* Offloaded bytes are copied while a pass runs. On a fast link the pass waits for one layer's copy. On a slow link the
   copies take longer than the pass, which waits for the rest. F, R and I copy checkpoints. W copies the gradients that
   ZeRO scatters. The optimizer's parameters are copied once a step. */
TEST(what_is_offloaded_crosses_the_link_to_the_host) {
    static const double rates[] = {64e9, 1e9};
    const double row = 2 * 3584, owned = 7615616512.0 / 8, rows = 28 * row * 8192, link = 0.75;
    cf_gpu gpu = *cf_gpu_find("h100-80g");
    int64_t i;
    gpu.nvlink = gpu.network = 1e18; /* ranks hide nothing */
    int way;
    for (i = 0; i < COUNT(rates); i++) {
        cf_stage_cost with[1], without[1];
        cf_timing timing;
        cf_cost_desc desc = {0};
        double step, before, all = rows / rates[i] / link, pass, waits;
        gpu.pcie = rates[i];
        desc.model = cf_model_find("qwen2.5-7b");
        desc.gpu = &gpu;
        desc.chunk_size = 8192;
        desc.parallel = split(1, 1, 8);
        desc.parallel.zero = 2;
        desc.parallel.recompute = CF_RECOMPUTE_FULL;
        REQUIRE(cf_cost_estimate(&desc, without, 1, &timing, &before, NULL) == CF_OK);
        desc.offload = CF_OFFLOAD_CHECKPOINTS;
        REQUIRE(cf_cost_estimate(&desc, with, 1, &timing, &step, NULL) == CF_OK);
        CHECK(near(step, before, 0));
        pass = cf_cost_seconds(&without->forward, 8192, cf_slice_pairs(0, 8192));
        waits = all * 27 / 28 > pass ? all - pass : all / 28;
        CHECK((all * 27 / 28 > pass) == (i == 1));
        CHECK(near(with->forward.constant - without->forward.constant, waits, 1e-9));
        CHECK(near(with->replay.constant - without->replay.constant, waits, 1e-9));
        pass = cf_cost_seconds(&without->input, 8192, cf_slice_pairs(0, 8192));
        waits = all * 27 / 28 > pass ? all - pass : all / 28;
        CHECK(near(with->input.constant - without->input.constant, waits, 1e-9));
        CHECK(near(with->weight.constant, without->weight.constant, 0));
        desc.offload = CF_OFFLOAD_OPTIMIZER;
        REQUIRE(cf_cost_estimate(&desc, with, 1, &timing, &step, NULL) == CF_OK);
        all = 4 * owned / rates[i] / link;
        pass = cf_cost_seconds(&without->weight, 8192, cf_slice_pairs(0, 8192));
        waits = all * 27 / 28 > pass ? all - pass : all / 28;
        CHECK(near(with->weight.constant - without->weight.constant, waits, 1e-6));
        CHECK(near(with->forward.constant, without->forward.constant, 0));
        CHECK(near(step - before, 2 * owned / rates[i] / link - 30 * owned / gpu.bandwidth, 1e-6));
        desc.offload = 0;
        desc.parallel.zero = 0;
        desc.parallel.recompute = CF_RECOMPUTE_NONE;
        desc.outputs = 1; /* 28 heads of 128 values in bf16, and one fp32 number */
        REQUIRE(cf_cost_estimate(&desc, without, 1, &timing, NULL, NULL) == CF_OK);
        all = 28 * 28.0 * (2 * 128 + 4) * 8192 / rates[i] / link;
        pass = cf_cost_seconds(&without->forward, 8192, cf_slice_pairs(0, 8192));
        waits = all * 27 / 28 > pass ? all - pass : all / 28; /* out to the host, and in again */
        pass = cf_cost_seconds(&without->replay, 8192, cf_slice_pairs(0, 8192));
        waits += all * 27 / 28 > pass ? all - pass : all / 28;
        for (way = 0; way < 2; way++) { /* in host memory on its own, and if the state streams */
            desc.outputs = way == 0 ? 2 : 1;
            desc.stream = way;
            REQUIRE(cf_cost_estimate(&desc, with, 1, &timing, NULL, NULL) == CF_OK);
            CHECK(near(with->replay.constant - without->replay.constant, waits, 1e-6));
            CHECK(near(with->forward.constant, without->forward.constant, 0));
        }
    }
}

/* ---- without attention's outputs ---- */

typedef struct digest {
    uint64_t sum;
} digest;

static void add(digest *d, int64_t value) { d->sum = (d->sum ^ (uint64_t)value) * 0x100000001b3u + (d->sum >> 40); }

/* Adds a number rounded to nine digits, because compilers may round the last bits of an estimate differently. */
static void add_real(digest *d, double value) {
    char text[32];
    int i;
    (void)snprintf(text, sizeof text, "%.8e", value);
    for (i = 0; text[i]; i++) add(d, text[i]);
}

static void add_memory(digest *d, const cf_memory_desc *desc, const cf_memory_load *load) {
    cf_token_bytes b;
    cf_memory_report r;
    REQUIRE(cf_memory_token_bytes(desc, 0, &b, NULL) == CF_OK);
    REQUIRE(cf_memory_estimate(desc, load, 1, &r, 1, NULL) == CF_OK);
    add(d, b.activations), add(d, b.state), add(d, b.state_gradient), add(d, b.boundary), add(d, b.logits);
    add(d, b.working), add(d, b.buffers), add(d, b.border), add(d, b.carry), add(d, b.routes);
#define ADD(name, text) add(d, r.name);
    CF_MEMORY_TERMS(ADD)
#undef ADD
    add(d, r.total), add(d, r.host), add(d, r.at_loss);
}

static void add_costs(digest *d, const cf_cost_desc *desc, cf_timing *timing, cf_stage_cost *stages) {
    double step;
    int pass;
    REQUIRE(cf_cost_estimate(desc, stages, 1, timing, &step, NULL) == CF_OK);
    for (pass = 0; pass < 5; pass++) {
        const cf_pass_cost of[] = {stages->forward, stages->replay, stages->backward, stages->input, stages->weight};
        add_real(d, of[pass].constant), add_real(d, of[pass].per_token), add_real(d, of[pass].per_pair);
    }
    add_real(d, timing->stream_forward), add_real(d, timing->stream_backward), add_real(d, timing->stream_exposed);
    add_real(d, step);
}

/* Adds schedules of two chains and three standalone chunks on three stages, by every kind that takes one virtual
   stage. */
static void add_schedules(digest *d, const cf_timing *timing) {
    static const int64_t lengths[] = {30000, 700, 2000, 9000, 3500, 64, 4000};
    static const cf_schedule_kind kinds[] = {CF_SCHEDULE_PAPER, CF_SCHEDULE_GPIPE, CF_SCHEDULE_1F1B,
                                             CF_SCHEDULE_ZERO_BUBBLE, CF_SCHEDULE_BEST};
    cf_pack_desc pack = {.chunk_size = 4096};
    cf_plan *plan = NULL;
    int64_t i, kind;
    REQUIRE(cf_pack(lengths, COUNT(lengths), &pack, &plan, NULL) == CF_OK);
    for (kind = 0; kind < COUNT(kinds); kind++) {
        cf_schedule_desc desc = {.kind = kinds[kind], .shape = {.n_stages = 3, .k = 2}, .timing = timing};
        cf_simulate_desc simulate = {.timing = timing};
        cf_schedule *schedule = NULL;
        cf_timeline *timeline = NULL;
        REQUIRE(cf_schedule_make(plan, &desc, &schedule, NULL) == CF_OK);
        REQUIRE(cf_simulate(plan, schedule, &simulate, &timeline, NULL) == CF_OK);
        for (i = 0; i < schedule->n_actions; i++) {
            const cf_action *a = &schedule->actions[i];
            add(d, a->pass), add(d, a->chunk), add(d, a->stage), add(d, a->keep);
            add_real(d, timeline->end[i]);
        }
        add_real(d, timeline->makespan), add_real(d, timeline->replayed);
        cf_timeline_free(timeline);
        cf_schedule_free(schedule);
    }
    cf_plan_free(plan);
}

/* Without outputs, bytes, seconds, schedules and timelines are the same as before outputs existed. This test gives the
   same digest at 9cb596f, the last commit without them. If the search of `best` changes on purpose, leave `best` out
   and take the digest of that commit again. */
TEST(without_outputs_everything_is_as_before) {
    static const char *const names[] = {"qwen2.5-7b",  "qwen3-30b-a3b", "gpt-oss-20b", "deepseek-v3",
                                        "llama-4-scout", "qwen3.5-27b",   "nemotron-3-nano-30b-a3b"};
    digest d = {0xcbf29ce484222325u};
    int64_t i, level, way;
    for (i = 0; i < COUNT(names); i++)
        for (level = CF_RECOMPUTE_NONE; level < CF_RECOMPUTE_COUNT; level++)
            for (way = 0; way < 4; way++) {
                cf_memory_desc memory = {0};
                cf_memory_load load = {.live_tokens = 9000, .chunk_tokens = 4096, .state_tokens = 30000,
                                       .state_gradient_tokens = 20000, .input_tokens = 26000};
                cf_cost_desc cost = {0};
                cf_timing timing;
                cf_stage_cost stage;
                memory.model = cost.model = cf_model_find(names[i]);
                memory.loss = CF_LOSS_PARALLEL; /* that commit's default */
                cost.gpu = cf_gpu_find("h100-80g");
                memory.parallel = split(1 + way % 2, 1, 1 + 3 * (way / 2));
                memory.parallel.recompute = (cf_recompute)level;
                memory.state_window = way == 3 ? 2048 : 0;
                cost.parallel = memory.parallel;
                cost.stream = way == 3;
                harness_note("%s, recompute %d, way %d", names[i], (int)level, (int)way);
                add_memory(&d, &memory, &load);
                add_costs(&d, &cost, &timing, &stage);
                timing.stages = NULL;
                timing.all = stage;
                if (level == CF_RECOMPUTE_NONE) add_schedules(&d, &timing);
            }
    harness_note("%s", "");
    CHECK_INT((int64_t)(d.sum & INT64_MAX), 6425800402803189481);
}

/* Half a wave: 7 heads x 16 blocks of 128 queries are one wave on 112 processors, so the cost is one and a half
   waves. */
TEST(small_chunks_leave_processors_idle) {
    cf_gpu gpu = only_flops();
    cf_stage_cost many[4], small[4];
    cf_timing timing;
    cf_cost_desc desc = {0};
    gpu.processors = 112;
    desc.model = cf_model_find("qwen2.5-7b");
    desc.gpu = &gpu;
    desc.parallel = split(4, 4, 1);
    REQUIRE(cf_cost_estimate(&desc, many, 4, &timing, NULL, NULL) == CF_OK);
    desc.chunk_size = 2048;
    REQUIRE(cf_cost_estimate(&desc, small, 4, &timing, NULL, NULL) == CF_OK);
    CHECK(near(small[0].forward.per_pair, 1.5 * many[0].forward.per_pair, 1e-12));
    CHECK(near(small[0].replay.per_pair, 1.5 * many[0].replay.per_pair, 1e-12));
    CHECK(near(small[0].backward.per_pair, many[0].backward.per_pair, 1e-12));
    CHECK(near(small[0].forward.per_token, many[0].forward.per_token, 0));
}

/* A smaller chunk costs more per token: constants, and state traffic. */
TEST(small_chunks_cost_more_a_token) {
    int64_t g, c;
    for (g = 0; g < COUNT(gpus); g++) {
        double last = INFINITY;
        for (c = 1024; c <= 65536; c *= 2) {
            cf_stage_cost stages[4];
            cf_timing timing;
            cf_cost_desc desc = {0};
            double a_token;
            desc.model = cf_model_find("qwen2.5-7b");
            desc.gpu = cf_gpu_find(gpus[g]);
            desc.parallel = split(4, 4, 1);
            desc.chunk_size = c;
            REQUIRE(cf_cost_estimate(&desc, stages, 4, &timing, NULL, NULL) == CF_OK);
            a_token = cf_cost_seconds(&stages[1].backward, c, c * 100000) / (double)c;
            CHECK(a_token < last && a_token > 0);
            last = a_token;
        }
    }
}

TEST(bad_estimates_are_named) {
    cf_gpu gpu = *cf_gpu_find("h200");
    cf_stage_cost stages[2];
    cf_timing timing;
    cf_cost_desc desc = {0};
    cf_error error;
    desc.model = cf_model_find("qwen2.5-7b");
    desc.gpu = &gpu;
    desc.parallel = split(1, 2, 1);
    harness_poison(stages, sizeof stages);
    harness_poison(&timing, sizeof timing);
    CHECK_INT(cf_cost_estimate(&desc, stages, 1, &timing, NULL, &error), CF_ERROR_ARGUMENT);
    CHECK_STR(error.field, "count");
    CHECK_INT(error.wanted, 2);
    gpu.bandwidth = NAN;
    CHECK_INT(cf_cost_estimate(&desc, stages, 2, &timing, NULL, &error), CF_ERROR_ARGUMENT);
    CHECK_STR(error.field, "gpu.bandwidth");
    gpu.bandwidth = 1;
    gpu.gemm = 1.5;
    CHECK_INT(cf_cost_estimate(&desc, stages, 2, &timing, NULL, &error), CF_ERROR_ARGUMENT);
    CHECK_STR(error.field, "gpu.gemm");
    gpu.gemm = 1;
    gpu.launch = -1;
    CHECK_INT(cf_cost_estimate(&desc, stages, 2, &timing, NULL, &error), CF_ERROR_ARGUMENT);
    CHECK_STR(error.field, "gpu.launch");
    gpu.launch = 0;
    gpu.processors = 0;
    CHECK_INT(cf_cost_estimate(&desc, stages, 2, &timing, NULL, &error), CF_ERROR_ARGUMENT);
    CHECK_STR(error.field, "gpu.processors");
    gpu.processors = 1;
    desc.chunk_size = -1;
    CHECK_INT(cf_cost_estimate(&desc, stages, 2, &timing, NULL, &error), CF_ERROR_ARGUMENT);
    CHECK_STR(error.field, "chunk_size");
    desc.chunk_size = 0;
    desc.gpus_per_node = -8;
    CHECK_INT(cf_cost_estimate(&desc, stages, 2, &timing, NULL, &error), CF_ERROR_ARGUMENT);
    CHECK_STR(error.field, "gpus_per_node");
    desc.gpu = NULL;
    CHECK_INT(cf_cost_estimate(&desc, stages, 2, &timing, NULL, &error), CF_ERROR_ARGUMENT);
    CHECK_STR(error.field, "gpu");
    CHECK_INT(cf_cost_estimate(NULL, stages, 2, &timing, NULL, &error), CF_ERROR_ARGUMENT);
    CHECK_POISON(stages, sizeof stages);
    CHECK_POISON(&timing, sizeof timing);
}

/* ---- state that is moved between passes, or streams ---- */

/* ---- fits ---- */

static cf_sample draw_sample(harness_rng *rng, int pass) {
    cf_sample sample;
    int64_t prefix = harness_between(rng, 0, 3) ? harness_between(rng, 0, 1 << 18) : 0;
    sample.pass = pass;
    sample.rows = harness_between(rng, 16, 1 << 15);
    sample.pairs = cf_slice_pairs(prefix, sample.rows);
    sample.seconds = 0;
    return sample;
}

/* Samples without noise give back the terms they were made from, even if some are 0. */
TEST(fits_return_exact_terms) {
    harness_rng rng = {31};
    int round, i;
    for (round = 0; round < 200; round++) {
        cf_pass_cost made;
        cf_sample samples[12];
        cf_stage_cost cost;
        cf_fit fits[5];
        cf_error error;
        made.constant = harness_between(&rng, 0, 3) ? harness_unit(&rng) * 1e-2 : 0;
        made.per_token = harness_between(&rng, 0, 3) ? harness_unit(&rng) * 1e-5 : 0;
        made.per_pair = harness_between(&rng, 0, 3) ? harness_unit(&rng) * 1e-9 : 1e-12;
        for (i = 0; i < 12; i++) {
            samples[i] = draw_sample(&rng, CF_B);
            samples[i].seconds = cf_cost_seconds(&made, samples[i].rows, samples[i].pairs);
        }
        if (cf_cost_fit(samples, 12, &cost, fits, &error) != CF_OK) {
            FAIL("%s", error.text);
            return;
        }
        for (i = 0; i < 20; i++) {
            cf_sample other = draw_sample(&rng, CF_B);
            CHECK(near(cf_cost_seconds(&cost.backward, other.rows, other.pairs),
                       cf_cost_seconds(&made, other.rows, other.pairs), 1e-4));
        }
        CHECK(fits[CF_B].mean_absolute < 1e-6 && fabs(fits[CF_B].worst_error) < 1e-5);
        CHECK_INT(fits[CF_B].n_samples, 12);
        CHECK_INT(fits[CF_F].n_samples, 0);
        CHECK_INT(fits[CF_F].worst_sample, -1);
        CHECK(cost.forward.constant <= 0 && cost.forward.per_token <= 0 && cost.forward.per_pair <= 0);
    }
}

/* Checks the conditions of the optimum. With r = 1 - predicted / measured, the slope of the sum of squares along a term
   is 0 if the term is above 0, and not negative if it is 0. */
static void check_optimum(const cf_sample *samples, int n, int pass, const cf_pass_cost *cost) {
    long double slope[3] = {0, 0, 0}, size[3] = {0, 0, 0};
    double term[3];
    int i, j;
    term[0] = cost->constant;
    term[1] = cost->per_token;
    term[2] = cost->per_pair;
    for (i = 0; i < n; i++) {
        long double column[3], r = 1;
        if (samples[i].pass != pass) continue;
        column[0] = 1 / (long double)samples[i].seconds;
        column[1] = (long double)samples[i].rows * column[0];
        column[2] = (long double)samples[i].pairs * column[0];
        for (j = 0; j < 3; j++) r -= column[j] * (long double)term[j];
        for (j = 0; j < 3; j++) {
            slope[j] += column[j] * r;
            size[j] += column[j];
        }
    }
    for (j = 0; j < 3; j++) {
        CHECK(term[j] >= 0);
        if (term[j] > 0) CHECK(fabsl(slope[j]) <= 1e-7L * size[j]);
        else CHECK(slope[j] <= 1e-7L * size[j]);
    }
}

TEST(fits_are_optimal) {
    harness_rng rng = {32};
    int round, i, zeros = 0;
    for (round = 0; round < 500; round++) {
        cf_sample samples[40];
        cf_stage_cost cost, again;
        cf_fit fits[5];
        double mean[2] = {0, 0}, worst[2] = {0, 0};
        int counts[2] = {0, 0};
        for (i = 0; i < 40; i++) {
            samples[i] = draw_sample(&rng, i % 2 ? CF_F : CF_W);
            samples[i].seconds = (1e-3 + 1e-6 * (double)samples[i].rows + 1e-11 * (double)samples[i].pairs) *
                                 (0.5 + harness_unit(&rng));
        }
        REQUIRE(cf_cost_fit(samples, 40, &cost, fits, NULL) == CF_OK);
        check_optimum(samples, 40, CF_F, &cost.forward);
        check_optimum(samples, 40, CF_W, &cost.weight);
        zeros += cost.forward.constant <= 0;
        REQUIRE(cf_cost_fit(samples, 40, &again, NULL, NULL) == CF_OK);
        CHECK(memcmp(&cost, &again, sizeof cost) == 0);
        for (i = 0; i < 40; i++) {
            int w = samples[i].pass == CF_W;
            double error = cf_cost_seconds(w ? &cost.weight : &cost.forward, samples[i].rows, samples[i].pairs) /
                               samples[i].seconds - 1;
            mean[w] += fabs(error);
            worst[w] = fabs(error) > worst[w] ? fabs(error) : worst[w];
            counts[w]++;
        }
        CHECK(near(fits[CF_F].mean_absolute, mean[0] / counts[0], 1e-12));
        CHECK(near(fabs(fits[CF_W].worst_error), worst[1], 1e-12));
        CHECK(samples[fits[CF_F].worst_sample].pass == CF_F);
    }
    CHECK(zeros > 10); /* the bound at 0 was reached */
}

static void check_bad_fit(const cf_sample *samples, int64_t n, cf_result code, const char *field, int64_t item) {
    cf_stage_cost cost;
    cf_fit fits[5];
    cf_error error;
    harness_poison(&cost, sizeof cost);
    harness_poison(fits, sizeof fits);
    CHECK_INT(cf_cost_fit(samples, n, &cost, fits, &error), code);
    CHECK_STR(error.field, field);
    CHECK_INT(error.item, item);
    CHECK_POISON(&cost, sizeof cost);
    CHECK_POISON(fits, sizeof fits);
}

TEST(bad_samples_are_named) {
    cf_sample good[4] = {{CF_F, 1000, 500500, 0.01}, {CF_F, 2000, 2001000, 0.021}, {CF_F, 4000, 8002000, 0.045},
                         {CF_F, 4000, 40000000, 0.06}};
    cf_sample samples[4];
    int64_t i;
    check_bad_fit(good, 2, CF_ERROR_ARGUMENT, "n", -1);
    check_bad_fit(good, -1, CF_ERROR_ARGUMENT, "n", -1);
    check_bad_fit(NULL, 4, CF_ERROR_ARGUMENT, "samples", -1);
    memcpy(samples, good, sizeof good);
    samples[3].pass = CF_B; /* one sample of B */
    check_bad_fit(samples, 4, CF_ERROR_ARGUMENT, "samples", CF_B);
    samples[3].pass = 5;
    check_bad_fit(samples, 4, CF_ERROR_ARGUMENT, "samples.pass", 3);
    memcpy(samples, good, sizeof good);
    samples[1].seconds = 0;
    check_bad_fit(samples, 4, CF_ERROR_ARGUMENT, "samples.seconds", 1);
    samples[1].seconds = INFINITY;
    check_bad_fit(samples, 4, CF_ERROR_ARGUMENT, "samples.seconds", 1);
    samples[1].seconds = NAN;
    check_bad_fit(samples, 4, CF_ERROR_ARGUMENT, "samples.seconds", 1);
    memcpy(samples, good, sizeof good);
    samples[2].rows = -1;
    check_bad_fit(samples, 4, CF_ERROR_ARGUMENT, "samples.rows", 2);
    memcpy(samples, good, sizeof good);
    samples[2].pairs = -1;
    check_bad_fit(samples, 4, CF_ERROR_ARGUMENT, "samples.pairs", 2);
    memcpy(samples, good, sizeof good);
    samples[0].seconds = 5e-324; /* its inverse is infinite */
    check_bad_fit(samples, 4, CF_ERROR_OVERFLOW, "samples.seconds", CF_F);
    memcpy(samples, good, sizeof good);
    for (i = 0; i < 4; i++) samples[i].rows = 4096; /* one chunk size cannot distinguish rows from the constant */
    check_bad_fit(samples, 4, CF_ERROR_ARGUMENT, "samples.rows", CF_F);
    memcpy(samples, good, sizeof good);
    for (i = 0; i < 4; i++) samples[i].pairs = 7 * samples[i].rows + 3;
    check_bad_fit(samples, 4, CF_ERROR_ARGUMENT, "samples.pairs", CF_F);
    for (i = 0; i < 4; i++) samples[i].pairs = 0;
    check_bad_fit(samples, 4, CF_ERROR_ARGUMENT, "samples.pairs", CF_F);
}

SUITE(models, CASE(counts_are_the_published_ones), CASE(names_are_found_in_any_case),
      CASE(export_versions_differ_in_nvlink_alone),
      CASE(counts_are_those_of_the_tensors), CASE(stages_add_up_to_the_model), CASE(shards_by_hand),
      CASE(layers_can_be_given_stage_by_stage), CASE(vocabulary_is_padded_as_megatron_does),
      CASE(megatron_parameter_formula), CASE(counts_of_kinds_are_the_published_ones),
      CASE(counts_of_kinds_are_those_of_the_tensors), CASE(stages_of_kinds_add_up), CASE(bad_kinds_are_named),
      CASE(bad_models_are_named), CASE(huge_models_do_not_overflow),
      CASE(bad_splits_are_named), CASE(estimates_count_the_flops), CASE(estimates_count_the_flops_of_kinds),
      CASE(experts_send_and_are_read), CASE(recompute_adds_a_forward), CASE(queries_of_recurrent_layers),
      CASE(modules_add_what_they_run_again), CASE(zero_2_and_3_send_in_every_pass),
      CASE(ranks_of_a_node_send_side_by_side), CASE(transfers_use_the_right_link),
      CASE(streams_cross_the_link_to_the_host), CASE(replays_with_outputs_do_not_attend),
      CASE(what_is_offloaded_crosses_the_link_to_the_host),
      CASE(without_outputs_everything_is_as_before),
      CASE(small_chunks_leave_processors_idle),
      CASE(small_chunks_cost_more_a_token), CASE(bad_estimates_are_named), CASE(fits_return_exact_terms),
      CASE(fits_are_optimal), CASE(bad_samples_are_named));
