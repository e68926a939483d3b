/* modelling.h - a model, how it is split over GPUs, and a JSON writer for numbers about it: what memory, time and all
   commands that begin with a model share. */

#ifndef CHUNKFLOW_MODELLING_H
#define CHUNKFLOW_MODELLING_H

#include "chunkflow_tune.h"
#include "config_json.h"

typedef struct modelling_options {
    const char *model;
    const char *config;
    int64_t layers, hidden, heads, kv_heads, head_dim, ffn, vocab; /* 0: not given */
    int tied, qkv_bias, qk_norm, no_gate;
    int64_t tp, pp, n_virtual, dp, zero;
    int no_sequence;
    int64_t recompute;
    const char *stage_layers;
} modelling_options;

#define MODELLING_DEFAULTS {NULL, NULL, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, NULL}

/* The entries of an option table; `member` is the modelling_options in the command's options struct `type`. */
#define MODELLING_OPTIONS(type, member)                                                                            \
    {"--model", "NAME", CLI_TEXT, offsetof(type, member.model), 0, 0, 0,                                           \
     "one of the models below"},                                                                                   \
    {"--config", "FILE", CLI_TEXT, offsetof(type, member.config), 0, 0, 0,                                         \
     "or a model's config.json"},                                                                                  \
    {"--layers", "N", CLI_NUMBER, offsetof(type, member.layers), 1, CF_MAX_LAYERS, 0,                              \
     "these change what --model or --config gave, or give a model\nof your own"},                                  \
    {"--hidden", "N", CLI_NUMBER, offsetof(type, member.hidden), 1, CF_MAX_WIDTH, 0, "hidden size"},               \
    {"--heads", "N", CLI_NUMBER, offsetof(type, member.heads), 1, CF_MAX_WIDTH, 0, "query heads"},                 \
    {"--kv-heads", "N", CLI_NUMBER, offsetof(type, member.kv_heads), 1, CF_MAX_WIDTH, 0,                           \
     "key and value heads; default as many as query heads"},                                                       \
    {"--head-dim", "N", CLI_NUMBER, offsetof(type, member.head_dim), 1, CF_MAX_WIDTH, 0,                           \
     "size of a head; default hidden / heads"},                                                                    \
    {"--ffn", "N", CLI_NUMBER, offsetof(type, member.ffn), 1, CF_MAX_FFN, 0, "width of the MLP"},                  \
    {"--vocab", "N", CLI_NUMBER, offsetof(type, member.vocab), 1, CF_MAX_VOCAB, 0, "vocabulary"},                  \
    {"--tied", NULL, CLI_FLAG, offsetof(type, member.tied), 0, 0, 0, "the output head is the embedding"},          \
    {"--qkv-bias", NULL, CLI_FLAG, offsetof(type, member.qkv_bias), 0, 0, 0, "biases on Q, K and V"},              \
    {"--qk-norm", NULL, CLI_FLAG, offsetof(type, member.qk_norm), 0, 0, 0, "norms over the heads of Q and K"},     \
    {"--no-gate", NULL, CLI_FLAG, offsetof(type, member.no_gate), 0, 0, 0, "two MLP matrices, not three"},         \
    {"--tp", "N", CLI_NUMBER, offsetof(type, member.tp), 1, CF_MAX_RANKS, 0, "tensor parallel; default 1"},        \
    {"--pp", "N", CLI_NUMBER, offsetof(type, member.pp), 1, CF_MAX_LAYERS, 0, "pipeline stages; default 1"},       \
    {"--virtual", "N", CLI_NUMBER, offsetof(type, member.n_virtual), 1, CF_MAX_LAYERS, 0,                          \
     "virtual stages of each stage; default 1"},                                                                   \
    {"--dp", "N", CLI_NUMBER, offsetof(type, member.dp), 1, CF_MAX_RANKS, 0, "data-parallel ranks; default 1"},    \
    {"--zero", "LEVEL", CLI_NUMBER, offsetof(type, member.zero), 0, 3, 0,                                          \
     "what data-parallel ranks divide: 1 optimizer states (the\ndistributed optimizer), 2 gradients too, 3 "        \
     "parameters too;\ndefault 0, nothing"},                                                                       \
    {"--no-sp", NULL, CLI_FLAG, offsetof(type, member.no_sequence), 0, 0, 0,                                       \
     "no sequence parallelism beside tensor parallelism"},                                                         \
    {"--recompute", "none|selective|full", CLI_CHOICE, offsetof(type, member.recompute), 0, 0, 0,                  \
     "what backward makes again: nothing (the default), the inside\nof attention, or whole layers"},               \
    {"--stage-layers", "N,N,...", CLI_TEXT, offsetof(type, member.stage_layers), 0, 0, 0,                          \
     "layers of each (virtual) stage; default even"}

/* A model and its split, checked. */
typedef struct modelling {
    config_json config; /* where --config was read */
    cf_model model;
    cf_parallel parallel;
    int64_t *layers;    /* of --stage-layers */
} modelling;

/* `command` is named in messages. Returns an exit code; after CLI_OK modelling_free is due. */
int modelling_make(const char *command, const modelling_options *asked, modelling *out);
void modelling_free(modelling *m);

/* "qwen2.5-7b: 7,615,616,512 parameters; tp 4 x pp 4 x dp 1 = 16 GPUs, ..." */
void modelling_print(const modelling *m);

/* The models and GPUs that have names, for the help. */
#define MODELLING_NAMES                                                                                     \
    "models\n"                                                                                              \
    "  qwen2.5-0.5b 1.5b 3b 7b 14b 32b 72b, qwen3-0.6b 1.7b 4b 8b 14b 32b, llama-3-8b 70b, llama-3.1-405b,\n" \
    "  llama-3.2-1b 3b. Dense models only: a mixture of experts is refused.\n"
#define MODELLING_GPUS "GPUs\n  a100-40g, a100-80g, h100-80g, h200\n"

/* Finds a GPU by name; NULL after a message. */
const cf_gpu *modelling_gpu(const char *command, const char *name);

/* Writes JSON by and by; commas are its own matter. */
typedef struct json_writer {
    cli_output *to;
    int inside; /* whether the object or array at hand has a member already */
} json_writer;

void json_open(json_writer *w, const char *key, char bracket); /* key NULL: none */
void json_close(json_writer *w, char bracket);
void json_integer_member(json_writer *w, const char *key, int64_t value);
void json_number_member(json_writer *w, const char *key, double value);
void json_text_member(json_writer *w, const char *key, const char *value); /* printable ASCII; others become ? */

/* The members that describe a model and its split. */
void modelling_write(json_writer *w, const modelling *m);

#endif /* CHUNKFLOW_MODELLING_H */
