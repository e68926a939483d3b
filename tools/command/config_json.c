/* config_json.c - a model's description from the config.json that comes with its weights. */

#include "config_json.h"
#include "json_read.h"

#include <stdlib.h>
#include <string.h>

#define MAX_BYTES ((size_t)16 << 20) /* such a file has a few kilobytes */

/* What the types add to what the file says. */
typedef struct model_type {
    const char *name;
    int qkv_bias;       /* always there, whatever attention_bias says */
    int attention_bias; /* the member counts: biases on Q, K, V and the output */
    int qk_norm;
    int windowed; /* a sliding_window counts unless use_sliding_window is false; of others only where it is true */
} model_type;

static const model_type types[] = {{.name = "qwen2", .qkv_bias = 1},
                                   {.name = "qwen3", .attention_bias = 1, .qk_norm = 1},
                                   {.name = "llama", .attention_bias = 1},
                                   {.name = "mistral", .windowed = 1},
                                   {.name = NULL}};

/* What decides whether the rest is worth reading: the type, members of a mixture of experts alone, and a window. */
#define N_EXPERT_MEMBERS 5

typedef struct kind_object {
    uint32_t type;
    int64_t experts[N_EXPERT_MEMBERS];
    int64_t window;
    int use_window;
} kind_object;

#define EXPERTS(key, place) \
    {.name = key, .type = JSON_INT, .offset = offsetof(kind_object, experts[place]), .optional = 1, .nullable = 1}

static const json_field kind_fields[] = {
    {.name = "model_type", .type = JSON_TEXT_OF, .offset = offsetof(kind_object, type)},
    EXPERTS("num_experts", 0), EXPERTS("num_local_experts", 1), EXPERTS("n_routed_experts", 2),
    EXPERTS("moe_intermediate_size", 3), EXPERTS("num_experts_per_tok", 4),
    {.name = "sliding_window", .type = JSON_INT, .offset = offsetof(kind_object, window), .optional = 1, .nullable = 1},
    {.name = "use_sliding_window", .type = JSON_BOOL, .offset = offsetof(kind_object, use_window), .optional = 1,
     .nullable = 1},
    {.name = NULL}};

typedef struct size_object {
    cf_model model;
    int attention_bias;
} size_object;

#define SIZE(key, member) {.name = key, .type = JSON_COUNT, .offset = offsetof(size_object, model.member)}
#define OPTIONAL_SIZE(key, member) \
    {.name = key, .type = JSON_COUNT, .offset = offsetof(size_object, model.member), .optional = 1, .nullable = 1}
#define FLAG(key, member) \
    {.name = key, .type = JSON_BOOL, .offset = offsetof(size_object, member), .optional = 1, .nullable = 1}

static const json_field size_fields[] = {
    SIZE("num_hidden_layers", layers), SIZE("hidden_size", hidden), SIZE("num_attention_heads", heads),
    SIZE("intermediate_size", ffn), SIZE("vocab_size", vocab),
    OPTIONAL_SIZE("num_key_value_heads", kv_heads), OPTIONAL_SIZE("head_dim", head_dim),
    FLAG("tie_word_embeddings", model.tied), FLAG("mlp_bias", model.mlp_bias), FLAG("attention_bias", attention_bias),
    {.name = NULL}};

static const model_type *find_type(const char *name) {
    const model_type *type = types;
    while (type->name && strcmp(type->name, name) != 0) type++;
    return type->name ? type : NULL;
}

static int read_type(const json_document *document, char *name, size_t size, const model_type **out) {
    kind_object kind;
    int code, has_experts, i;

    memset(&kind, 0, sizeof kind);
    kind.use_window = -1;
    code = json_read_object(document, 0, kind_fields, &kind, NULL);
    if (code != CLI_OK) return code;
    json_copy_text(document, kind.type, name, size);
    has_experts = strstr(name, "moe") != NULL || strcmp(name, "mixtral") == 0;
    for (i = 0; i < N_EXPERT_MEMBERS; i++) has_experts |= kind.experts[i] > 1;
    if (has_experts)
        return json_wrong(document, kind.type, "model_type: a mixture of experts; only dense models can be described, "
                          "and the dense formulas would give wrong numbers for it");
    *out = find_type(name);
    if (!*out)
        return json_wrong(document, kind.type,
                          "model_type: unknown; wanted qwen2, qwen3, llama or mistral, or give the sizes as options");
    if (kind.window == 0 || kind.use_window == 0 || (kind.use_window < 0 && !(*out)->windowed)) return CLI_OK;
    return json_wrong(document, kind.type,
                      "sliding_window: layers that see the last %lld tokens; only full attention can "
                      "be described, whose time and state would be too much for it", (long long)kind.window);
}

static int read_sizes(const json_document *document, const model_type *type, cf_model *out) {
    size_object sizes;
    cf_model *model = &sizes.model;
    cf_error error;
    int code;

    memset(&sizes, 0, sizeof sizes);
    code = json_read_object(document, 0, size_fields, &sizes, NULL);
    if (code != CLI_OK) return code;
    if (model->kv_heads == 0) model->kv_heads = model->heads;
    if (model->head_dim == 0 && model->hidden % model->heads != 0)
        return json_wrong(document, 0, "head_dim is missing, and hidden_size is no multiple of num_attention_heads");
    if (model->head_dim == 0) model->head_dim = model->hidden / model->heads;
    model->out_bias = type->attention_bias && sizes.attention_bias;
    model->qkv_bias = type->qkv_bias || model->out_bias;
    model->qk_norm = type->qk_norm;
    if (cf_model_validate(model, &error) != CF_OK) return json_wrong(document, 0, "%s", error.text);
    *out = *model;
    return CLI_OK;
}

int config_json_read(const char *path, config_json *out) {
    json_document document;
    const model_type *type = NULL;
    config_json fresh;
    char *text = NULL;
    size_t bytes;
    int code = cli_file_read(path, MAX_BYTES, &text, &bytes);

    if (code != CLI_OK) return code;
    memset(&fresh, 0, sizeof fresh);
    code = json_parse(path, text, bytes, &document);
    if (code == CLI_OK) {
        code = json_check(&document);
        if (code == CLI_OK) code = read_type(&document, fresh.name, sizeof fresh.name, &type);
        if (code == CLI_OK) code = read_sizes(&document, type, &fresh.model);
        json_free(&document);
    }
    free(text);
    if (code != CLI_OK) return code;
    *out = fresh;
    out->model.name = out->name;
    return CLI_OK;
}
