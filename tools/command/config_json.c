/* config_json.c - a model's description from the config.json that comes with its weights. */

#include "config_json.h"
#include "json_read.h"

#include <stdlib.h>
#include <string.h>

#define MAX_BYTES ((size_t)16 << 20) /* such files have a few kilobytes */

/* Facts about a type of model that are not in its file. */
typedef struct model_type {
    const char *name;
    int qkv_bias;       /* 1: always; 2: if attention_bias says so, and never on the output; 3: unless qkv_bias is
                           false; 4: unless attention_bias is false, on the output if attention_out_bias says so */
    int attention_bias; /* 1: the member decides on biases on Q, K, V and the output; 2: they exist unless it is
                           false */
    int qk_norm;        /* 1: always; 2: if use_qk_norm says so; 3: always, each over all heads; 4: unless
                           use_qk_norm is false */
    int windowed;       /* 1: sliding_window counts unless use_sliding_window is false; 0: only if it is true */
    int experts;        /* 1: required, of their own width; 2: required, of intermediate_size; 3: optional */
    int shared;         /* experts that every token uses. 1: n_shared_experts of them; 2: always one */
    int latent;         /* there must be latents */
    int gate;           /* 1: attention's output is gated unless attn_output_gate is false */
    int shared_gate;
    int sinks;          /* 1: in all layers; 2: only in windows, whose heads differ in size from the others */
    int mlp_bias;       /* 1: always; 2: if mlp_bias says so */
    cf_mixer linear;    /* what linear_attention is */
    int norms;
    int tied;           /* 1: unless tie_word_embeddings is false; -1: never; 2: as the object with the sizes says; 3:
                           as that object says if the whole file does not; otherwise the member of the whole file
                           decides */
    int dense;          /* if the file does not say: number of first layers without experts */
    int every;          /* if the file does not say: one of this many layers, the last, has full attention */
    int alone;          /* 1: each layer is only a mixer, or only an MLP of two matrices, or only experts */
    int64_t heads, kv_heads, head_dim, vocab; /* defaults of the type's own configuration class */
} model_type;

/* Types, without the "_text" that the nested object of a multimodal model has. */
static const model_type types[] = {
    {.name = "qwen2", .qkv_bias = 1, .kv_heads = 32},
    {.name = "qwen2_vl", .qkv_bias = 1, .kv_heads = 8},
    {.name = "qwen2_5_vl", .qkv_bias = 1, .kv_heads = 8},
    {.name = "qwen2_moe", .qkv_bias = 3, .experts = 1, .shared_gate = 1, .kv_heads = 16},
    {.name = "qwen3", .attention_bias = 1, .qk_norm = 1, .head_dim = 128, .kv_heads = 32},
    {.name = "mimo", .qkv_bias = 1},
    {.name = "llama", .attention_bias = 1, .mlp_bias = 2},
    {.name = "granite", .attention_bias = 1, .mlp_bias = 2},
    {.name = "granitemoe", .attention_bias = 1, .experts = 2},
    {.name = "smollm3", .attention_bias = 1, .mlp_bias = 2, .tied = 1, .kv_heads = 4},
    {.name = "phi3", .windowed = 1},
    {.name = "mistral", .windowed = 1, .kv_heads = 8},
    {.name = "mixtral", .windowed = 1, .experts = 2, .kv_heads = 8},
    {.name = "qwen3_moe", .attention_bias = 1, .qk_norm = 1, .experts = 1, .kv_heads = 4},
    {.name = "qwen3_vl", .attention_bias = 1, .qk_norm = 1, .kv_heads = 32, .head_dim = 128},
    {.name = "qwen3_vl_moe", .attention_bias = 1, .qk_norm = 1, .experts = 1, .kv_heads = 16},
    {.name = "qwen3_next", .attention_bias = 1, .qk_norm = 1, .experts = 1, .gate = 1, .shared_gate = 1,
     .linear = CF_MIXER_DELTA, .kv_heads = 2, .head_dim = 256},
    {.name = "qwen3_5", .attention_bias = 1, .qk_norm = 1, .gate = 1, .linear = CF_MIXER_DELTA, .kv_heads = 4,
     .head_dim = 256},
    {.name = "qwen3_5_moe", .attention_bias = 1, .qk_norm = 1, .experts = 1, .gate = 1, .shared_gate = 1,
     .linear = CF_MIXER_DELTA, .kv_heads = 2, .head_dim = 256},
    {.name = "gpt_oss", .attention_bias = 2, .experts = 2, .sinks = 1, .mlp_bias = 1, .every = 2, .head_dim = 64,
     .kv_heads = 8},
    {.name = "minimax_m2", .qk_norm = 3, .experts = 2, .kv_heads = 8, .head_dim = 128},
    {.name = "deepseek_v2", .experts = 1, .latent = 1, .shared = 1, .mlp_bias = 2},
    {.name = "deepseek_v3", .experts = 1, .latent = 1, .shared = 1, .dense = 3},
    {.name = "kimi_k2", .experts = 1, .latent = 1, .shared = 1, .dense = 1},
    {.name = "glm4_moe", .qkv_bias = 2, .qk_norm = 2, .experts = 1, .shared = 1, .kv_heads = 8, .dense = 1},
    {.name = "glm4_moe_lite", .experts = 1, .latent = 1, .shared = 1, .dense = 1},
    {.name = "llama4", .attention_bias = 1, .experts = 2, .shared = 2, .every = 4, .tied = 2, .kv_heads = 8,
     .head_dim = 128},
    {.name = "gemma", .attention_bias = 1, .tied = 1, .head_dim = 256, .kv_heads = 16},
    {.name = "gemma2", .attention_bias = 1, .norms = 4, .tied = 1, .every = 2, .head_dim = 256, .kv_heads = 4},
    {.name = "gemma3", .attention_bias = 1, .qk_norm = 1, .norms = 4, .tied = 1, .every = 6, .heads = 8,
     .kv_heads = 4, .head_dim = 256, .vocab = 262208},
    {.name = "kimi_linear", .experts = 1, .latent = 1, .shared = 1, .linear = CF_MIXER_KDA, .dense = 1, .tied = -1},
    {.name = "nemotron_h", .experts = 3, .mlp_bias = 2, .linear = CF_MIXER_MAMBA2, .alone = 1, .tied = -1,
     .kv_heads = 8, .head_dim = 128},
    {.name = "mimo_v2_flash", .qkv_bias = 2, .experts = 1, .sinks = 2, .dense = 1, .kv_heads = 4, .head_dim = 192},
    {.name = "seed_oss", .qkv_bias = 4, .mlp_bias = 2, .kv_heads = 8, .head_dim = 128},
    {.name = "ministral3", .windowed = 1, .tied = 3, .kv_heads = 8, .head_dim = 128},
    {.name = "olmo3", .attention_bias = 1, .qk_norm = 3, .every = 4},
    {.name = "ernie4_5_moe", .experts = 1, .shared = 1, .tied = 1, .dense = 1, .kv_heads = 4},
    {.name = "bailing_moe_v2", .qkv_bias = 2, .qk_norm = 4, .experts = 1, .shared = 1, .dense = 1, .kv_heads = 4,
     .head_dim = 128},
    {.name = "hunyuan_v1_moe", .attention_bias = 1, .qk_norm = 1, .experts = 2, .shared = 2},
    {.name = NULL}};

static const char known[] = "qwen2, qwen2_moe, qwen2_vl, qwen2_5_vl, qwen3, qwen3_moe, qwen3_vl, qwen3_next, qwen3_5, "
                            "llama, llama4, mistral, mixtral, gpt_oss, deepseek_v2, deepseek_v3, kimi_k2, kimi_linear, "
                            "glm4_moe, glm4_moe_lite, gemma, gemma2, gemma3, phi3, granite, granitemoe, smollm3, "
                            "minimax_m2, mimo, mimo_v2_flash, seed_oss, ministral3, olmo3, ernie4_5_moe, "
                            "bailing_moe_v2, hunyuan_v1_moe or nemotron_h";

/* All members that are read. A missing number is 0, a missing flag -1. */
typedef struct config_object {
    cf_model model;
    uint32_t type, layer_types, mlp_types, expert_layers, mlp_only, linear, block_types, letters;
    uint32_t windows, frequency;
    int64_t experts[3], active[2], groups, group_limit, expert_ffn, shared_ffn, shared_count[2];
    int64_t first_dense, last_sparse, sparse_step;
    int64_t window, max_window_layers, window_pattern, chunk, dense_ffn, full_interval;
    int64_t reach_back, window_heads, window_kv_heads, window_head_dim, window_value_dim; /* of layers with windows */
    int64_t latent, q_latent, nope, rope, value_dim;
    int64_t linear_width[2]; /* KDA's heads, and the width of each */
    int64_t linear_heads, linear_keys, linear_key_dim, linear_value_dim, linear_tail, latent_experts, other;
    int use_window, attention_bias, out_bias, qkv_bias, mlp_bias, gate, use_qk_norm, all_bias, tail_bias;
    int no_ffn; /* 1: the file does not give an MLP's width */
} config_object;

#define MEMBER(key, kind, member) \
    {.name = key, .type = kind, .offset = offsetof(config_object, member), .optional = 1, .nullable = 1}

static const json_field fields[] = {
    {.name = "num_hidden_layers", .type = JSON_COUNT, .offset = offsetof(config_object, model.layers), .optional = 1},
    {.name = "hidden_size", .type = JSON_COUNT, .offset = offsetof(config_object, model.hidden)},
    {.name = "num_attention_heads", .type = JSON_COUNT, .offset = offsetof(config_object, model.heads), .optional = 1},
    {.name = "vocab_size", .type = JSON_COUNT, .offset = offsetof(config_object, model.vocab), .optional = 1},
    MEMBER("intermediate_size", JSON_COUNT, model.ffn), MEMBER("num_key_value_heads", JSON_COUNT, model.kv_heads),
    MEMBER("head_dim", JSON_COUNT, model.head_dim),
    MEMBER("mlp_bias", JSON_BOOL, mlp_bias),
    MEMBER("attention_bias", JSON_BOOL, attention_bias), MEMBER("use_qk_norm", JSON_BOOL, use_qk_norm),
    MEMBER("attn_output_gate", JSON_BOOL, gate), MEMBER("layer_types", JSON_ARRAY_OF, layer_types),
    MEMBER("num_experts", JSON_INT, experts[0]), MEMBER("num_local_experts", JSON_INT, experts[1]),
    MEMBER("n_routed_experts", JSON_INT, experts[2]), MEMBER("num_experts_per_tok", JSON_COUNT, active[0]),
    MEMBER("num_experts_per_token", JSON_COUNT, active[1]), MEMBER("moe_intermediate_size", JSON_EACH, expert_ffn),
    MEMBER("shared_expert_intermediate_size", JSON_INT, shared_ffn),
    MEMBER("n_group", JSON_COUNT, groups), MEMBER("topk_group", JSON_COUNT, group_limit),
    MEMBER("n_shared_experts", JSON_INT, shared_count[0]), MEMBER("num_shared_experts", JSON_INT, shared_count[1]),
    MEMBER("first_k_dense_replace", JSON_INT, first_dense), MEMBER("decoder_sparse_step", JSON_COUNT, sparse_step),
    MEMBER("interleave_moe_layer_step", JSON_COUNT, sparse_step), MEMBER("mlp_only_layers", JSON_ARRAY_OF, mlp_only),
    MEMBER("intermediate_size_mlp", JSON_COUNT, dense_ffn),
    MEMBER("sliding_window", JSON_INT, window), MEMBER("use_sliding_window", JSON_BOOL, use_window),
    MEMBER("max_window_layers", JSON_INT, max_window_layers), MEMBER("attention_chunk_size", JSON_COUNT, chunk),
    MEMBER("sliding_window_pattern", JSON_COUNT, window_pattern),
    MEMBER("_sliding_window_pattern", JSON_COUNT, window_pattern),
    MEMBER("full_attention_interval", JSON_COUNT, full_interval), MEMBER("kv_lora_rank", JSON_COUNT, latent),
    MEMBER("q_lora_rank", JSON_COUNT, q_latent), MEMBER("qk_nope_head_dim", JSON_COUNT, nope),
    MEMBER("qk_rope_head_dim", JSON_COUNT, rope), MEMBER("v_head_dim", JSON_COUNT, value_dim),
    MEMBER("linear_num_value_heads", JSON_COUNT, linear_heads), MEMBER("linear_num_key_heads", JSON_COUNT, linear_keys),
    MEMBER("linear_key_head_dim", JSON_COUNT, linear_key_dim),
    MEMBER("linear_value_head_dim", JSON_COUNT, linear_value_dim),
    MEMBER("linear_conv_kernel_dim", JSON_COUNT, linear_tail), MEMBER("linear_attn_config", JSON_OBJECT_OF, linear),
    {.name = NULL}};

typedef char fields_fit[sizeof fields / sizeof fields[0] <= JSON_MAX_FIELDS + 1 ? 1 : -1];

/* Members of few families, and members that are read only to be refused. */
static const json_field more_fields[] = {
    MEMBER("layers_block_type", JSON_ARRAY_OF, block_types), MEMBER("hybrid_override_pattern", JSON_TEXT_OF, letters),
    MEMBER("mamba_num_heads", JSON_COUNT, linear_heads), MEMBER("n_groups", JSON_COUNT, linear_keys),
    MEMBER("ssm_state_size", JSON_COUNT, linear_key_dim), MEMBER("mamba_head_dim", JSON_COUNT, linear_value_dim),
    MEMBER("conv_kernel", JSON_COUNT, linear_tail), MEMBER("moe_shared_expert_intermediate_size", JSON_INT, shared_ffn),
    MEMBER("attention_head_dim", JSON_COUNT, model.head_dim), MEMBER("use_bias", JSON_BOOL, all_bias),
    MEMBER("use_conv_bias", JSON_BOOL, tail_bias), MEMBER("qkv_bias", JSON_BOOL, qkv_bias),
    MEMBER("mlp_layer_types", JSON_ARRAY_OF, mlp_types), MEMBER("moe_layers", JSON_ARRAY_OF, expert_layers),
    MEMBER("linear_num_heads", JSON_COUNT, linear_width[0]), MEMBER("linear_head_dim", JSON_COUNT, linear_width[1]),
    MEMBER("shared_intermediate_size", JSON_INT, shared_ffn), MEMBER("moe_layer_freq", JSON_NODE_OF, frequency),
    MEMBER("moe_latent_size", JSON_INT, latent_experts), MEMBER("routed_expert_hidden_size", JSON_INT, latent_experts),
    MEMBER("index_topk", JSON_INT, other), MEMBER("num_kv_shared_layers", JSON_INT, other),
    MEMBER("attn_res_block_size", JSON_INT, other), MEMBER("global_head_dim", JSON_INT, other),
    MEMBER("swa_num_attention_heads", JSON_COUNT, window_heads), MEMBER("swa_head_dim", JSON_INT, window_head_dim),
    MEMBER("swa_num_key_value_heads", JSON_COUNT, window_kv_heads),
    MEMBER("swa_v_head_dim", JSON_COUNT, window_value_dim), MEMBER("sliding_window_size", JSON_COUNT, reach_back),
    MEMBER("hybrid_layer_pattern", JSON_ARRAY_OF, windows), MEMBER("attention_out_bias", JSON_BOOL, out_bias),
    MEMBER("moe_num_experts", JSON_INT, experts[0]), MEMBER("moe_k", JSON_COUNT, active[0]),
    MEMBER("moe_num_shared_experts", JSON_INT, shared_count[0]), MEMBER("moe_topk", JSON_EACH, active[0]),
    MEMBER("moe_layer_start_index", JSON_INT, first_dense), MEMBER("moe_layer_end_index", JSON_INT, last_sparse),
    MEMBER("moe_layer_interval", JSON_COUNT, sparse_step), MEMBER("use_qkv_bias", JSON_BOOL, attention_bias),
    {.name = NULL}};

/* Members of the whole file, read before the object with the sizes is known. */
typedef struct outer_object {
    uint32_t type, text;
    int tied, text_tied;
} outer_object;

static const json_field outer_fields[] = {
    {.name = "model_type", .type = JSON_TEXT_OF, .offset = offsetof(outer_object, type)},
    {.name = "text_config", .type = JSON_OBJECT_OF, .offset = offsetof(outer_object, text), .optional = 1},
    {.name = "tie_word_embeddings", .type = JSON_BOOL, .offset = offsetof(outer_object, tied), .optional = 1,
     .nullable = 1},
    {.name = NULL}};

/* Lists of layers, whose numbers count from 1 (kimi_linear). */
typedef struct linear_object {
    uint32_t full;
    int64_t heads, dim, tail;
    int full_rank_gate;
} linear_object;

static const json_field linear_fields[] = {
    {.name = "full_attn_layers", .type = JSON_ARRAY_OF, .offset = offsetof(linear_object, full)},
    {.name = "num_heads", .type = JSON_COUNT, .offset = offsetof(linear_object, heads)},
    {.name = "head_dim", .type = JSON_COUNT, .offset = offsetof(linear_object, dim)},
    {.name = "short_conv_kernel_size", .type = JSON_COUNT, .offset = offsetof(linear_object, tail)},
    {.name = "use_full_rank_gate", .type = JSON_BOOL, .offset = offsetof(linear_object, full_rank_gate), .optional = 1},
    {.name = NULL}};

static const model_type *find_type(const char *name) {
    const model_type *type = types;
    size_t n = strlen(name);
    if (n > 5 && strcmp(name + n - 5, "_text") == 0) n -= 5;
    while (type->name && (strncmp(type->name, name, n) != 0 || type->name[n] != '\0')) type++;
    return type->name ? type : NULL;
}

/* Finds the object with the sizes, and its type. */
static int read_type(const json_document *document, config_json *out, outer_object *outer, const model_type **type) {
    int code;

    memset(outer, 0, sizeof *outer);
    outer->tied = outer->text_tied = -1;
    code = json_read_object(document, 0, outer_fields, outer, NULL);
    if (!outer->text) outer->text_tied = outer->tied;
    if (code == CLI_OK && outer->text) {
        outer_object inner = {0, 0, -1, -1};
        code = json_read_object(document, outer->text, outer_fields, &inner, NULL);
        outer->type = inner.type;
        outer->text_tied = inner.tied;
    }
    if (code != CLI_OK) return code;
    json_copy_text(document, outer->type, out->name, sizeof out->name);
    *type = find_type(out->name);
    if (*type) return CLI_OK;
    return json_wrong(document, outer->type, "model_type: '%s' is unknown; wanted %s, or give the sizes as options",
                      out->name, known);
}

/* ---- kinds of layers ---- */

/* The choice for one layer: its mixer, and whether it has experts. */
typedef struct layer_choice {
    cf_mixer mixer;
    int experts;
} layer_choice;

typedef struct reading {
    const json_document *document;
    const model_type *type;
    config_object c;
    config_json *out;
} reading;

static int64_t first_of(const int64_t *values, int n) {
    int64_t sum = 0;
    while (n-- > 0) sum = values[n] > 0 ? values[n] : sum;
    return sum;
}

/* Multiplies non-negative numbers. An overflow becomes the largest number, which no model may have. */
static int64_t product(int64_t a, int64_t b) {
    return b > 0 && a > INT64_MAX / b ? INT64_MAX : a * b;
}

/* Sets the heads of MiMo-V2-Flash. Windows have twice the heads of K and V if the file does not give the number.
   sliding_window_size does not include the row itself. */
static void set_heads(const config_object *c, cf_layer *kind) {
    kind->value_dim = c->value_dim;
    if (kind->mixer != CF_MIXER_WINDOW) return;
    kind->sinks = 1;
    kind->heads = c->window_heads;
    kind->kv_heads = c->window_kv_heads > 0 ? c->window_kv_heads : product(c->model.kv_heads, 2);
    kind->head_dim = c->window_head_dim;
    if (c->window_value_dim > 0) kind->value_dim = c->window_value_dim;
    if (c->reach_back > 0 && c->reach_back < INT64_MAX) kind->window = c->reach_back + 1;
}

/* Returns the layer of a choice, with its sizes. */
static cf_layer make_kind(const reading *r, layer_choice choice) {
    const config_object *c = &r->c;
    cf_layer kind;

    memset(&kind, 0, sizeof kind);
    kind.mixer = choice.mixer;
    kind.sinks = r->type->sinks == 1;
    kind.gate = r->type->gate && c->gate != 0 && choice.mixer <= CF_MIXER_CHUNKED;
    kind.no_ffn = r->type->alone && choice.mixer != CF_MIXER_NONE;
    if (choice.mixer == CF_MIXER_WINDOW) kind.window = c->window;
    if (choice.mixer == CF_MIXER_CHUNKED) kind.window = c->chunk;
    if (r->type->sinks == 2) set_heads(c, &kind);
    if (choice.mixer == CF_MIXER_LATENT) {
        kind.head_dim = c->nope + c->rope;
        kind.value_dim = c->value_dim;
        kind.latent = c->latent;
        kind.q_latent = c->q_latent;
        kind.rope_dim = c->rope;
    }
    if (choice.mixer >= CF_MIXER_DELTA && choice.mixer != CF_MIXER_NONE) {
        kind.heads = c->linear_heads;
        kind.kv_heads = c->linear_keys;
        kind.head_dim = c->linear_key_dim;
        kind.value_dim = c->linear_value_dim;
        kind.tail = c->linear_tail;
    }
    if (!choice.experts) return kind;
    kind.experts = first_of(c->experts, 3);
    kind.active = first_of(c->active, 2);
    if (c->group_limit < c->groups) kind.reach = kind.experts / c->groups * c->group_limit;
    kind.ffn = r->type->experts == 2 ? c->model.ffn : c->expert_ffn;
    kind.shared_gate = r->type->shared_gate;
    kind.shared = c->shared_ffn > 0 ? c->shared_ffn : product(first_of(c->shared_count, 2), kind.ffn);
    if (r->type->shared == 2) kind.shared = kind.ffn;
    return kind;
}

static int choose_by_name(const reading *r, uint32_t node, layer_choice *out) {
    char text[64];

    json_copy_text(r->document, node, text, sizeof text);
    if (strcmp(text, "full_attention") == 0) out->mixer = r->c.latent > 0 ? CF_MIXER_LATENT : CF_MIXER_FULL;
    else if (strcmp(text, "sliding_attention") == 0) out->mixer = CF_MIXER_WINDOW;
    else if (strcmp(text, "chunked_attention") == 0) out->mixer = CF_MIXER_CHUNKED;
    else if (strcmp(text, "linear_attention") == 0 && r->type->linear) out->mixer = r->type->linear;
    else return json_wrong(r->document, node, "layer_types: there is no '%s' in a %s", text, r->type->name);
    return CLI_OK;
}

/* Chooses the layers of Nemotron-H, which has a word per layer, or a letter in older files. */
static int choose_alone(const reading *r, layer_choice *choices) {
    static const char *const names[] = {"mamba", "attention", "moe", "mlp", "linear_attention", "full_attention"};
    static const char letters[] = "M*E-M*";
    const uint32_t list = r->c.block_types ? r->c.block_types : r->c.letters;
    char text[CONFIG_MAX_LAYERS + 2];
    uint32_t node = list + 1;
    int64_t i;
    size_t k;

    json_copy_text(r->document, list, text, sizeof text);
    if (r->c.model.layers != (r->c.block_types ? json_count(r->document, list) : (int64_t)strlen(text)))
        return json_wrong(r->document, list, "wanted one kind of layer for each of num_hidden_layers");
    for (i = 0; i < r->c.model.layers; i++) {
        char letter = text[i], word[24];
        if (r->c.block_types) {
            json_copy_text(r->document, node, word, sizeof word);
            node = r->document->nodes[node].next;
            for (k = 0; k < sizeof letters - 1 && strcmp(word, names[k]) != 0; k++) continue;
            letter = letters[k];
        }
        if (letter == '\0' || !strchr(letters, letter))
            return json_wrong(r->document, list, "layer %lld is of no kind that is known", (long long)i);
        choices[i].mixer = letter == 'M' ? CF_MIXER_MAMBA2 : letter == '*' ? CF_MIXER_FULL : CF_MIXER_NONE;
        choices[i].experts = letter == 'E';
    }
    return CLI_OK;
}

/* Returns the mixer of a layer for a file without layer_types. */
static cf_mixer choose_mixer(const reading *r, int64_t layer) {
    const config_object *c = &r->c;
    int windowed = c->window > 0 && c->use_window != 0 && (r->type->windowed || c->use_window > 0);
    int64_t period = c->full_interval > 0 ? c->full_interval : 4;
    int64_t every = c->window_pattern > 0 ? c->window_pattern : r->type->every;

    if (r->type->linear && (layer + 1) % period != 0) return r->type->linear;
    if (c->latent > 0) return CF_MIXER_LATENT;
    if (every > 0 && (layer + 1) % every == 0) return CF_MIXER_FULL;
    if (every > 0) return c->chunk > 0 ? CF_MIXER_CHUNKED : CF_MIXER_WINDOW;
    return windowed && layer >= c->max_window_layers ? CF_MIXER_WINDOW : CF_MIXER_FULL;
}

/* Marks the layers of a list, whose first layer has the number `first`. */
static int mark_layers(const reading *r, uint32_t array, const char *name, int64_t first, char *marks) {
    uint32_t node = array + 1;
    int64_t i, n = json_count(r->document, array), layer;
    int code;

    for (i = 0; i < n; i++, node = r->document->nodes[node].next) {
        code = json_read_int(r->document, node, name, &layer);
        if (code != CLI_OK) return code;
        if (layer < first || layer - first >= r->c.model.layers)
            return json_wrong(r->document, node, "%s: there is no layer %lld", name, (long long)layer);
        marks[layer - first] = 1;
    }
    return CLI_OK;
}

/* Marks the layers that a list of words calls sparse. */
static int mark_sparse(const reading *r, uint32_t array, char *marks) {
    uint32_t node = array + 1;
    int64_t i;
    char word[16];

    if (json_count(r->document, array) != r->c.model.layers)
        return json_wrong(r->document, array, "mlp_layer_types: wanted one for each of num_hidden_layers");
    for (i = 0; i < r->c.model.layers; i++, node = r->document->nodes[node].next) {
        json_copy_text(r->document, node, word, sizeof word);
        marks[i] = strcmp(word, "sparse") == 0;
        if (!marks[i] && strcmp(word, "dense") != 0)
            return json_wrong(r->document, node, "mlp_layer_types: wanted dense or sparse, got '%s'", word);
    }
    return CLI_OK;
}

/* Marks the layers for which a list of zeros and ones has a one. */
static int mark_ones(const reading *r, uint32_t array, const char *name, char *marks) {
    uint32_t node = array + 1;
    int64_t i, one;
    int code = CLI_OK;

    if (json_count(r->document, array) != r->c.model.layers)
        return json_wrong(r->document, array, "%s: wanted one number for each of num_hidden_layers", name);
    for (i = 0; i < r->c.model.layers && code == CLI_OK; i++, node = r->document->nodes[node].next) {
        code = json_read_int(r->document, node, name, &one);
        if (code == CLI_OK && one != 0 && one != 1) code = json_wrong(r->document, node, "%s: wanted 0 or 1", name);
        marks[i] = code == CLI_OK && one == 1;
    }
    return code;
}

/* Marks the layers that have experts. */
static int choose_experts(const reading *r, layer_choice *choices) {
    const config_object *c = &r->c;
    const int words = c->mlp_types && r->type->dense; /* Transformers does not read it for other types either */
    const int ones = c->frequency && r->document->nodes[c->frequency].kind == JSON_ARRAY;
    const int listed = words || ones || c->expert_layers;
    char sparse[CONFIG_MAX_LAYERS] = {0}, dense[CONFIG_MAX_LAYERS] = {0};
    int64_t i, step = c->sparse_step > 0 ? c->sparse_step : 1;
    int code = CLI_OK;

    if (words) code = mark_sparse(r, c->mlp_types, sparse);
    else if (ones) code = mark_ones(r, c->frequency, "moe_layer_freq", sparse);
    else if (c->expert_layers) code = mark_layers(r, c->expert_layers, "moe_layers", 0, sparse);
    if (code == CLI_OK && c->mlp_only) code = mark_layers(r, c->mlp_only, "mlp_only_layers", 0, dense);
    for (i = 0; i < c->model.layers && code == CLI_OK; i++) {
        int by_number = i >= c->first_dense && (c->last_sparse < 0 || i <= c->last_sparse) && (i + 1) % step == 0;
        choices[i].experts = r->type->experts && !dense[i] && (listed ? sparse[i] : by_number);
    }
    return code;
}

static int choose_layers(reading *r, layer_choice *choices) {
    const config_object *c = &r->c;
    uint32_t node = c->layer_types + 1;
    int64_t i;
    char windows[CONFIG_MAX_LAYERS] = {0};
    int code = choose_experts(r, choices);

    if (c->windows && code == CLI_OK) code = mark_ones(r, c->windows, "hybrid_layer_pattern", windows);
    if (c->layer_types && json_count(r->document, c->layer_types) != c->model.layers)
        return json_wrong(r->document, c->layer_types, "layer_types: wanted one for each of num_hidden_layers");
    for (i = 0; i < c->model.layers && code == CLI_OK; i++) {
        choices[i].mixer = windows[i] ? CF_MIXER_WINDOW : choose_mixer(r, i);
        if (c->linear) choices[i].mixer = r->type->linear;
        if (!c->layer_types) continue;
        code = choose_by_name(r, node, &choices[i]);
        node = r->document->nodes[node].next;
    }
    return code;
}

/* Refuses a kind whose sizes are missing from the file, for which Transformers would use those of some model. */
static int check_kind(const reading *r, const cf_layer *kind, int experts) {
    int recurrent = kind->mixer >= CF_MIXER_DELTA && kind->mixer != CF_MIXER_NONE;

    if (r->c.no_ffn && !experts && !kind->no_ffn) return json_wrong(r->document, 0, "intermediate_size is missing");
    if (r->type->shared == 2 && !experts && r->c.dense_ffn == 0)
        return json_wrong(r->document, 0, "intermediate_size_mlp is missing");
    if (recurrent && (kind->heads == 0 || kind->kv_heads == 0 || kind->head_dim == 0 || kind->value_dim == 0 ||
                      kind->tail == 0))
        return json_wrong(r->document, 0, "a size of recurrent layers (linear_num_value_heads, linear_conv_kernel_dim; "
                                          "mamba_num_heads, conv_kernel ...) is missing");
    return CLI_OK;
}

/* Gives kinds letters in the order in which they first occur. */
static int name_kinds(reading *r, const layer_choice *choices) {
    layer_choice seen[CONFIG_MAX_KINDS];
    cf_model *model = &r->out->model;
    int64_t i;
    int k, n = 0, code;

    for (i = 0; i < model->layers; i++) {
        for (k = 0; k < n; k++)
            if (seen[k].mixer == choices[i].mixer && seen[k].experts == choices[i].experts) break;
        if (k == CONFIG_MAX_KINDS)
            return json_wrong(r->document, 0, "more than %d kinds of layers", CONFIG_MAX_KINDS);
        if (k == n) seen[n++] = choices[i];
        r->out->pattern[i] = (char)('a' + k);
    }
    r->out->pattern[i] = '\0';
    for (k = 0; k < n; k++) {
        r->out->kinds[k] = make_kind(r, seen[k]);
        code = check_kind(r, &r->out->kinds[k], seen[k].experts);
        if (code != CLI_OK) return code;
    }
    if (n > 1 || choices[0].mixer != CF_MIXER_FULL || choices[0].experts) model->n_kinds = n; /* else it is dense */
    return CLI_OK;
}

static int read_linear(reading *r, layer_choice *choices) {
    config_object *c = &r->c;
    linear_object linear;
    char full[CONFIG_MAX_LAYERS] = {0};
    int64_t i;
    int code;

    memset(&linear, 0, sizeof linear);
    code = json_read_object(r->document, c->linear, linear_fields, &linear, NULL);
    if (code != CLI_OK) return code;
    if (linear.full_rank_gate)
        return json_wrong(r->document, c->linear, "use_full_rank_gate: only gates of low rank can be described");
    c->linear_heads = c->linear_keys = linear.heads;
    c->linear_key_dim = c->linear_value_dim = linear.dim;
    c->linear_tail = linear.tail;
    code = mark_layers(r, linear.full, "full_attn_layers", 1, full);
    for (i = 0; i < c->model.layers && code == CLI_OK; i++)
        if (full[i]) choices[i].mixer = CF_MIXER_LATENT;
    return code;
}

static int read_kinds(reading *r) {
    layer_choice choices[CONFIG_MAX_LAYERS];
    int code;

    if (r->c.model.layers > CONFIG_MAX_LAYERS) {
        if (!r->type->experts && !r->type->linear && !r->c.layer_types && r->c.window == 0) return CLI_OK;
        return json_wrong(r->document, 0, "num_hidden_layers: at most %d where they may differ", CONFIG_MAX_LAYERS);
    }
    code = r->type->alone ? choose_alone(r, choices) : choose_layers(r, choices);
    if (code == CLI_OK && r->c.linear && r->type->linear == CF_MIXER_KDA) code = read_linear(r, choices);
    return code == CLI_OK ? name_kinds(r, choices) : code;
}

/* Refuses members that no formula here covers. */
static int check_members(const reading *r) {
    const config_object *c = &r->c;
    const struct {
        const char *name;
        int missing;
    } needed[] = {{"kv_lora_rank", r->type->latent && c->latent == 0},
                  {"qk_nope_head_dim", r->type->latent && c->nope == 0},
                  {"qk_rope_head_dim", r->type->latent && c->rope == 0},
                  {"v_head_dim", (r->type->latent || r->type->sinks == 2) && c->value_dim == 0},
                  {"layer_types", r->type->linear == CF_MIXER_KDA && !c->layer_types && !c->linear},
                  {"layer_types", r->type->sinks == 2 && !c->layer_types && !c->windows},
                  {"moe_intermediate_size", r->type->experts == 1 && c->expert_ffn == 0},
                  {"shared_expert_intermediate_size", r->type->shared_gate && c->shared_ffn < 0},
                  {"n_shared_experts", r->type->shared == 1 && c->shared_count[0] < 0 && c->shared_count[1] < 0}};
    int64_t step = 1;
    size_t i;

    if (c->latent > 0 && c->attention_bias)
        return json_wrong(r->document, 0, "attention_bias: biases around latents cannot be described");
    if (r->type->mlp_bias == 2 && r->type->experts && c->mlp_bias)
        return json_wrong(r->document, 0, "mlp_bias: biases of some MLPs and no experts cannot be described");
    if (r->type->alone && (c->all_bias || !c->tail_bias))
        return json_wrong(r->document, 0, "use_bias, use_conv_bias: only convolutions with biases, and nothing else, "
                                          "can be described");
    if (!r->type->alone && c->all_bias)
        return json_wrong(r->document, 0, "use_bias: biases of all projections, the head's included, cannot be "
                                          "described");
    if (c->latent_experts > 0)
        return json_wrong(r->document, 0, "routed_expert_hidden_size, moe_latent_size: experts whose rows are narrower "
                                          "cannot be described");
    if (c->other > 0 || (c->window_head_dim > 0 && r->type->sinks != 2))
        return json_wrong(r->document, 0, "index_topk, num_kv_shared_layers, attn_res_block_size, global_head_dim, "
                                          "swa_head_dim: such layers cannot be described");
    if (c->frequency && r->document->nodes[c->frequency].kind != JSON_ARRAY) {
        int code = json_read_int(r->document, c->frequency, "moe_layer_freq", &step);
        if (code != CLI_OK) return code;
    }
    if (step != 1)
        return json_wrong(r->document, 0, "moe_layer_freq: experts in some layers cannot be described this way");
    for (i = 0; i < sizeof needed / sizeof needed[0]; i++)
        if (needed[i].missing) return json_wrong(r->document, 0, "%s is missing", needed[i].name);
    if (!r->type->experts && (first_of(c->experts, 3) > 1 || first_of(c->active, 2) > 1 || c->expert_ffn > 1))
        return json_wrong(r->document, 0, "a mixture of experts, which no %s is", r->type->name);
    if (r->type->experts && r->type->experts < 3 && (first_of(c->experts, 3) < 1 || first_of(c->active, 2) < 1))
        return json_wrong(r->document, 0, "num_experts and num_experts_per_tok, or what they are called there, are "
                                          "missing");
    if (c->groups > 0 && (first_of(c->experts, 3) % c->groups != 0 || c->group_limit > c->groups))
        return json_wrong(r->document, 0,
                          "n_group, topk_group: wanted groups that divide the experts, and no more for a token");
    return CLI_OK;
}

/* Reads the number of layers, which Nemotron-H's list gives if num_hidden_layers does not. */
static int count_layers(reading *r) {
    config_object *c = &r->c;
    char text[CONFIG_MAX_LAYERS + 2];

    if (r->type->alone && !c->block_types && !c->letters)
        return json_wrong(r->document, 0, "layers_block_type is missing");
    if (r->type->alone && c->model.layers == 0 && c->block_types)
        c->model.layers = json_count(r->document, c->block_types);
    else if (r->type->alone && c->model.layers == 0) {
        json_copy_text(r->document, c->letters, text, sizeof text);
        c->model.layers = (int64_t)strlen(text);
    }
    if (c->model.layers == 0) return json_wrong(r->document, 0, "num_hidden_layers is missing");
    return CLI_OK;
}

/* Reads the sizes that all layers share. */
static int read_sizes(reading *r, const outer_object *outer) {
    const model_type *type = r->type;
    config_object *c = &r->c;
    cf_model *model = &c->model;
    int code;

    c->use_window = c->gate = c->use_qk_norm = c->qkv_bias = c->tail_bias = -1;
    c->attention_bias = type->attention_bias == 2 || type->qkv_bias == 4;
    c->last_sparse = -1;
    c->shared_ffn = c->shared_count[0] = c->shared_count[1] = -1;
    c->first_dense = type->dense;
    code = json_read_object(r->document, outer->text, fields, c, NULL);
    if (code == CLI_OK) code = json_read_object(r->document, outer->text, more_fields, c, NULL);
    if (code == CLI_OK) code = count_layers(r);
    if (code == CLI_OK) code = check_members(r);
    if (code != CLI_OK) return code;
    if (c->linear_width[0] > 0) c->linear_heads = c->linear_keys = c->linear_width[0];
    if (c->linear_width[1] > 0) c->linear_key_dim = c->linear_value_dim = c->linear_width[1];
    if (model->ffn == 0 && !type->experts)
        return json_wrong(r->document, 0, "intermediate_size: wanted a whole number");
    model->tied = outer->tied >= 0 ? outer->tied : type->tied == 1;
    if (type->tied == 2) model->tied = outer->text_tied > 0;
    if (type->tied == 3 && outer->tied < 0) model->tied = outer->text_tied > 0;
    if (type->tied == -1) model->tied = 0;
    if (model->kv_heads == 0) model->kv_heads = type->kv_heads;
    if (model->heads == 0) model->heads = type->heads;
    if (model->vocab == 0) model->vocab = type->vocab;
    if (model->heads == 0) return json_wrong(r->document, 0, "num_attention_heads is missing");
    if (model->vocab == 0) return json_wrong(r->document, 0, "vocab_size is missing");
    if (model->kv_heads == 0) model->kv_heads = model->heads;
    if (model->head_dim == 0) model->head_dim = type->head_dim;
    if (c->latent > 0) model->head_dim = c->nope + c->rope;
    if (model->head_dim == 0 && model->hidden % model->heads != 0)
        return json_wrong(r->document, 0, "head_dim is missing, and hidden_size is no multiple of num_attention_heads");
    if (model->head_dim == 0) model->head_dim = model->hidden / model->heads;
    c->no_ffn = model->ffn == 0;
    if (model->ffn == 0) model->ffn = c->expert_ffn;
    model->out_bias = type->qkv_bias == 4 ? c->out_bias : type->attention_bias && c->attention_bias;
    model->qkv_bias = type->qkv_bias == 1 || (type->qkv_bias == 3 && c->qkv_bias != 0) ||
                      ((type->qkv_bias == 2 || type->qkv_bias == 4 || type->attention_bias) && c->attention_bias);
    model->qk_norm = type->qk_norm == 3 ? 2 : type->qk_norm == 1 || (type->qk_norm == 2 && c->use_qk_norm > 0) ||
                                                  (type->qk_norm == 4 && c->use_qk_norm != 0);
    model->mlp_bias = type->mlp_bias == 1 || (type->mlp_bias == 2 && c->mlp_bias > 0);
    model->norms = type->norms;
    model->no_gate = type->alone;
    return CLI_OK;
}

/* Reports the library's refusal, in the file's own words. */
static int refuse_model(const reading *r, const cf_error *error) {
    static const struct {
        const char *field, *name;
    } words[] = {{"model.layers", "num_hidden_layers"}, {"model.hidden", "hidden_size"},
                 {"model.heads", "num_attention_heads"}, {"model.kv_heads", "num_key_value_heads"},
                 {"model.head_dim", "head_dim"}, {"model.ffn", "intermediate_size"}, {"model.vocab", "vocab_size"},
                 {"kinds.heads", "linear_num_value_heads, mamba_num_heads"}, {"kinds.head_dim", "head_dim"},
                 {"kinds.kv_heads", "linear_num_key_heads, n_groups, swa_num_key_value_heads"},
                 {"kinds.window", "sliding_window"},
                 {"kinds.value_dim", "v_head_dim, linear_value_head_dim, mamba_head_dim"},
                 {"kinds.latent", "kv_lora_rank"}, {"kinds.q_latent", "q_lora_rank"},
                 {"kinds.rope_dim", "qk_rope_head_dim"}, {"kinds.tail", "linear_conv_kernel_dim, conv_kernel"},
                 {"kinds.ffn", "moe_intermediate_size"}, {"kinds.experts", "num_experts"},
                 {"kinds.reach", "topk_group"}, {"kinds.shared", "n_shared_experts"}};
    size_t i;

    if (strcmp(error->field, "kinds.active") == 0)
        return json_wrong(r->document, 0, "num_experts_per_tok: wanted 1 to the number of experts, %lld, got %lld",
                          (long long)first_of(r->c.experts, 3), (long long)error->got);
    for (i = 0; i < sizeof words / sizeof words[0]; i++)
        if (strcmp(error->field, words[i].field) == 0)
            return json_wrong(r->document, 0, "%s%s", words[i].name, strchr(error->text, ':'));
    return json_wrong(r->document, 0, "%s", error->text);
}

static int read_model(reading *r, const outer_object *outer) {
    cf_model *model = &r->out->model;
    cf_error error;
    int code = read_sizes(r, outer);

    if (code != CLI_OK) return code;
    *model = r->c.model;
    code = read_kinds(r);
    if (code != CLI_OK) return code;
    if (r->c.dense_ffn > 0) model->ffn = r->c.dense_ffn;
    *model = config_json_take_model(r->out);
    if (cf_model_validate(model, &error) != CF_OK) return refuse_model(r, &error);
    return CLI_OK;
}

cf_model config_json_take_model(const config_json *config) {
    cf_model model = config->model;

    model.name = config->name;
    model.kinds = model.n_kinds > 0 ? config->kinds : NULL;
    model.pattern = model.n_kinds > 0 ? config->pattern : NULL;
    return model;
}

/* Removes Infinity and NaN, which Python writes and JSON lacks (time_step_limit of Nemotron-H). Outside strings they
   become null, or a number that no size can be. */
static void no_infinities(char *text) {
    static const char *const words[] = {"-Infinity", "Infinity", "NaN"};
    int quoted = 0, k;

    for (; *text; text++) {
        if (*text == '"') quoted = !quoted;
        else if (*text == '\\' && quoted && text[1]) text++;
        for (k = 0; k < 3 && !quoted; k++) {
            size_t n = strlen(words[k]);
            if (strncmp(text, words[k], n) != 0) continue;
            memset(text, ' ', n);
            memcpy(text, n > 3 ? "null" : "0.0", n > 3 ? 4 : 3);
        }
    }
}

static int read_file(const char *path, json_document *out) {
    char *text;
    size_t bytes;
    int code = cli_file_read(path, MAX_BYTES, &text, &bytes);

    if (code != CLI_OK) return code;
    no_infinities(text);
    code = json_parse(path, text, bytes, out);
    if (code == CLI_OK) out->own = text;
    else free(text);
    return code;
}

int config_json_read(const char *path, config_json *out) {
    json_document document;
    outer_object outer;
    config_json fresh;
    reading r;
    int code = read_file(path, &document);

    if (code != CLI_OK) return code;
    memset(&fresh, 0, sizeof fresh);
    memset(&r, 0, sizeof r);
    r.document = &document;
    r.out = &fresh;
    code = json_check(&document);
    if (code == CLI_OK) code = read_type(&document, &fresh, &outer, &r.type);
    if (code == CLI_OK) code = read_model(&r, &outer);
    json_free(&document);
    if (code != CLI_OK) return code;
    *out = fresh;
    out->model = config_json_take_model(out);
    return CLI_OK;
}
