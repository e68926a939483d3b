/* config_json.c - a model's description from the config.json that comes with its weights. */

#include "config_json.h"

#ifndef HAVE_JANSSON

int config_json_read(const char *path, config_json *out) {
    (void)out;
    return cli_failed("%s: this chunkflow was built without a JSON library and cannot read it; install "
                      "libjansson-dev and build again, or give the sizes as options", path);
}

#else

#include <jansson.h>
#include <string.h>

/* What the types add to what the file says. */
typedef struct model_type {
    const char *name;
    int qkv_bias;       /* always there, whatever attention_bias says */
    int attention_bias; /* the key counts: biases on Q, K, V and the output */
    int qk_norm;
} model_type;

static const model_type types[] = {
    {"qwen2", 1, 0, 0}, {"qwen3", 0, 1, 1}, {"llama", 0, 1, 0}, {"mistral", 0, 0, 0}, {NULL, 0, 0, 0}};

/* Keys that only a mixture of experts has. */
static const char *const expert_keys[] = {"num_experts",      "num_local_experts",     "n_routed_experts",
                                          "moe_intermediate_size", "num_experts_per_tok", NULL};

static int wrong(const char *path, const char *key, const char *why) {
    fprintf(stderr, "chunkflow: %s: %s: %s\n", path, key, why);
    return CLI_WRONG;
}

static int refuse_experts(const char *path, const json_t *root, const char *type) {
    int i;
    int has = strstr(type, "moe") != NULL || strcmp(type, "mixtral") == 0;
    for (i = 0; expert_keys[i] && !has; i++) {
        const json_t *value = json_object_get(root, expert_keys[i]);
        has = json_is_integer(value) && json_integer_value(value) > 1;
    }
    if (!has) return CLI_OK;
    return wrong(path, "model_type", "a mixture of experts; only dense models can be described, and the dense formulas "
                                     "would give wrong numbers for it");
}

static const model_type *find_type(const char *name) {
    const model_type *type = types;
    while (type->name && strcmp(type->name, name) != 0) type++;
    return type->name ? type : NULL;
}

/* A whole number above 0. With `fallback` 0 the key must be there; null counts as absent. */
static int take_number(const char *path, const json_t *root, const char *key, int64_t fallback, int64_t *out) {
    const json_t *value = json_object_get(root, key);
    if (!value || json_is_null(value)) {
        if (fallback == 0) return wrong(path, key, "is missing");
        *out = fallback;
        return CLI_OK;
    }
    if (!json_is_integer(value) || json_integer_value(value) < 1)
        return wrong(path, key, "wanted a whole number above 0");
    *out = (int64_t)json_integer_value(value);
    return CLI_OK;
}

static int take_flag(const char *path, const json_t *root, const char *key, int *out) {
    const json_t *value = json_object_get(root, key);
    *out = 0;
    if (!value || json_is_null(value)) return CLI_OK;
    if (!json_is_boolean(value)) return wrong(path, key, "wanted true or false");
    *out = json_is_true(value);
    return CLI_OK;
}

static int take_sizes(const char *path, const json_t *root, cf_model *model) {
    int code;
    if ((code = take_number(path, root, "num_hidden_layers", 0, &model->layers)) != CLI_OK) return code;
    if ((code = take_number(path, root, "hidden_size", 0, &model->hidden)) != CLI_OK) return code;
    if ((code = take_number(path, root, "num_attention_heads", 0, &model->heads)) != CLI_OK) return code;
    if ((code = take_number(path, root, "num_key_value_heads", model->heads, &model->kv_heads)) != CLI_OK) return code;
    if ((code = take_number(path, root, "intermediate_size", 0, &model->ffn)) != CLI_OK) return code;
    if ((code = take_number(path, root, "vocab_size", 0, &model->vocab)) != CLI_OK) return code;
    if (model->hidden % model->heads == 0)
        return take_number(path, root, "head_dim", model->hidden / model->heads, &model->head_dim);
    return take_number(path, root, "head_dim", 0, &model->head_dim);
}

static int take_flags(const char *path, const json_t *root, const model_type *type, cf_model *model) {
    int attention_bias, code;
    if ((code = take_flag(path, root, "tie_word_embeddings", &model->tied)) != CLI_OK) return code;
    if ((code = take_flag(path, root, "mlp_bias", &model->mlp_bias)) != CLI_OK) return code;
    if ((code = take_flag(path, root, "attention_bias", &attention_bias)) != CLI_OK) return code;
    model->qkv_bias = type->qkv_bias || (type->attention_bias && attention_bias);
    model->out_bias = type->attention_bias && attention_bias;
    model->qk_norm = type->qk_norm;
    return CLI_OK;
}

static int take_model(const char *path, const json_t *root, config_json *out) {
    const char *name = json_string_value(json_object_get(root, "model_type"));
    const model_type *type;
    cf_error error;
    int code;

    if (!json_is_object(root)) return wrong(path, "the file", "wanted a JSON object");
    if (!name) return wrong(path, "model_type", "is missing, or no text");
    if ((code = refuse_experts(path, root, name)) != CLI_OK) return code;
    type = find_type(name);
    if (!type)
        return wrong(path, "model_type",
                     "unknown; wanted qwen2, qwen3, llama or mistral, or give the sizes as options");
    if ((code = take_sizes(path, root, &out->model)) != CLI_OK) return code;
    if ((code = take_flags(path, root, type, &out->model)) != CLI_OK) return code;
    if (cf_model_validate(&out->model, &error) != CF_OK) return wrong(path, error.field, error.text);
    snprintf(out->name, sizeof out->name, "%s", name);
    return CLI_OK;
}

int config_json_read(const char *path, config_json *out) {
    config_json fresh;
    json_error_t error;
    json_t *root = json_load_file(path, JSON_REJECT_DUPLICATES, &error);
    int code;

    if (!root) {
        if (error.line > 0) return cli_at_line(path, error.line, "%s", error.text);
        fprintf(stderr, "chunkflow: %s: %s\n", path, error.text);
        return CLI_WRONG;
    }
    memset(&fresh, 0, sizeof fresh);
    code = take_model(path, root, &fresh);
    json_decref(root);
    if (code != CLI_OK) return code;
    *out = fresh;
    out->model.name = out->name;
    return CLI_OK;
}

#endif
