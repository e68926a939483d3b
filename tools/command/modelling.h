/* modelling.h - a model and its split over GPUs, and their options: shared by memory, time and all commands that begin
   with a model. */

#ifndef CHUNKFLOW_MODELLING_H
#define CHUNKFLOW_MODELLING_H

#include "../chunkflow_tune.h"
#include "config_json.h"
#include "json_write.h"

typedef struct modelling_options {
    const char *model;
    const char *config;
    int64_t layers, hidden, heads, kv_heads, head_dim, ffn, vocab; /* 0: not given */
    int tied, qkv_bias, qk_norm, no_gate;
    int64_t mtp, ep, imbalance;
    int64_t tp, pp, n_virtual, placement, dp;
    int64_t zero; /* of the choice 0|1|2|3 */
    int no_sequence;
    int64_t recompute, recompute_layers;
    const char *stage_layers;
} modelling_options;

/* Options that have no effect without a model: one of these gives one. */
#define NEEDS_MODEL .needs = "--model|--config|--layers|--hidden|--heads"

/* The entries of an option table; `member` is the modelling_options in the command's options struct `type`. The first
   table describes a model, the second its split, without stages and ranks, for which a command with a plan has its own
   options. */
#define MODELLING_MODEL_OPTIONS(type, member)                                                                      \
    {.name = "--model", .value = "NAME", .kind = CLI_TEXT, .offset = offsetof(type, member.model),                 \
     .help = "one of the models below"},                                                                           \
    {.name = "--config", .value = "FILE", .kind = CLI_TEXT, .offset = offsetof(type, member.config),               \
     .help = "or a model's config.json"},                                                                          \
    {.name = "--layers", .value = "N", .kind = CLI_NUMBER, .offset = offsetof(type, member.layers), .min = 1,      \
     .max = CF_MAX_LAYERS,                                                                                         \
     .help = "these change what --model or --config gave, or give a model\n"                                       \
     "of your own"},                                                                                               \
    {.name = "--hidden", .value = "N", .kind = CLI_NUMBER, .offset = offsetof(type, member.hidden), .min = 1,      \
     .max = CF_MAX_WIDTH, .help = "hidden size"},                                                                  \
    {.name = "--heads", .value = "N", .kind = CLI_NUMBER, .offset = offsetof(type, member.heads), .min = 1,        \
     .max = CF_MAX_WIDTH, .help = "query heads"},                                                                  \
    {.name = "--kv-heads", NEEDS_MODEL,                                                                            \
     .value = "N", .kind = CLI_NUMBER, .offset = offsetof(type, member.kv_heads), .min = 1,                        \
     .max = CF_MAX_WIDTH, .help = "key and value heads; default as many as query heads"},                          \
    {.name = "--head-dim", NEEDS_MODEL,                                                                            \
     .value = "N", .kind = CLI_NUMBER, .offset = offsetof(type, member.head_dim), .min = 1,                        \
     .max = CF_MAX_WIDTH, .help = "size of a head; default hidden / heads"},                                       \
    {.name = "--ffn", NEEDS_MODEL,                                                                                 \
     .value = "N", .kind = CLI_NUMBER, .offset = offsetof(type, member.ffn), .min = 1,                             \
     .max = CF_MAX_FFN, .help = "width of the MLP"},                                                               \
    {.name = "--vocab", NEEDS_MODEL,                                                                               \
     .value = "N", .kind = CLI_NUMBER, .offset = offsetof(type, member.vocab), .min = 1,                           \
     .max = CF_MAX_VOCAB, .help = "vocabulary"},                                                                   \
    {.name = "--tied", NEEDS_MODEL, .kind = CLI_FLAG, .offset = offsetof(type, member.tied),                       \
     .help = "the output head is the embedding"},                                                                  \
    {.name = "--qkv-bias", NEEDS_MODEL, .kind = CLI_FLAG, .offset = offsetof(type, member.qkv_bias),               \
     .help = "biases on Q, K and V"},                                                                              \
    {.name = "--qk-norm", NEEDS_MODEL, .kind = CLI_FLAG, .offset = offsetof(type, member.qk_norm),                 \
     .help = "norms over the heads of Q and K"},                                                                   \
    {.name = "--no-gate", NEEDS_MODEL, .kind = CLI_FLAG, .offset = offsetof(type, member.no_gate),                 \
     .help = "two MLP matrices, not three"},                                                                       \
    {.name = "--mtp", NEEDS_MODEL,                                                                                 \
     .value = "N", .kind = CLI_NUMBER, .offset = offsetof(type, member.mtp), .min = 1,                             \
     .max = CF_MAX_LAYERS, .help = "prediction layers that are also trained; default none"}

#define MODELLING_SPLIT_OPTIONS(type, member)                                                                      \
    {.name = "--tp", NEEDS_MODEL, .value = "N", .kind = CLI_NUMBER, .offset = offsetof(type, member.tp), .min = 1, \
     .max = CF_MAX_RANKS, .help = "tensor parallel; default 1"},                                                   \
    {.name = "--ep", NEEDS_MODEL, .value = "N", .kind = CLI_NUMBER, .offset = offsetof(type, member.ep), .min = 1, \
     .max = CF_MAX_EXPERTS,                                                                                        \
     .help = "expert parallel: a layer's experts lie on so many of a stage's\n"                                    \
     "GPUs (--tp x --ranks), whole; default 1: each has a part of every one"},                                     \
    {.name = "--imbalance", NEEDS_MODEL,                                                                           \
     .value = "PERCENT", .kind = CLI_NUMBER, .offset = offsetof(type, member.imbalance),                           \
     .max = 1000,                                                                                                  \
     .help = "rows more than the mean that the fullest GPU's experts get;\n"                                       \
     "default 0"},                                                                                                 \
    {.name = "--zero", NEEDS_MODEL, .value = "0|1|2|3", .kind = CLI_CHOICE, .offset = offsetof(type, member.zero), \
     .help = "what data-parallel ranks divide: 0 nothing, 1 optimizer states\n"                                    \
     "(the distributed optimizer), 2 gradients too, 3 parameters too, as\n"                                        \
     "FSDP does; default 1 where there are such ranks. tune --gpus also\n"                                         \
     "tries 2 and 3 where there is no pipeline"},                                                                  \
    {.name = "--no-sp", NEEDS_MODEL, .kind = CLI_FLAG, .offset = offsetof(type, member.no_sequence),               \
     .help = "no sequence parallelism beside tensor parallelism"},                                                 \
    {.name = "--recompute", NEEDS_MODEL, .value = "none|selective|layernorm|act|mlp|full", .kind = CLI_CHOICE,     \
     .offset = offsetof(type, member.recompute),                                                                   \
     .help = "what backward makes again: nothing (the default), the inside\n"                                      \
     "of attention (worth nothing with fused attention), norms' outputs,\n"                                        \
     "the MLP's activation too, the whole MLP too, or whole layers"},                                              \
    {.name = "--recompute-layers", NEEDS_MODEL, .value = "N", .kind = CLI_NUMBER,                                  \
     .offset = offsetof(type, member.recompute_layers), .min = 1, .max = CF_MAX_LAYERS,                            \
     .help = "so many layers of each (virtual) stage do that; default all"},                                       \
    {.name = "--stage-layers", NEEDS_MODEL, .value = "N,N,...", .kind = CLI_TEXT,                                  \
     .offset = offsetof(type, member.stage_layers), .help = "layers of each (virtual) stage; default even"}

#define MODELLING_OPTIONS(type, member)                                                                            \
    MODELLING_MODEL_OPTIONS(type, member),                                                                         \
    {.name = "--stages", .alias = "--pp", .value = "P",                                                            \
     .kind = CLI_NUMBER, .offset = offsetof(type, member.pp), .min = 1,                                            \
     .max = CF_MAX_LAYERS, .help = "pipeline stages; default 1"},                                                  \
    {.name = "--virtual", .value = "N", .kind = CLI_NUMBER, .offset = offsetof(type, member.n_virtual), .min = 1,  \
     .max = CF_MAX_LAYERS, .help = "virtual stages of each stage; default 1"},                                     \
    {.name = "--placement", .value = "loop|v", .kind = CLI_CHOICE, .offset = offsetof(type, member.placement),     \
     .help = "where they lie: in loops (the default), or there and back in a\n"                                    \
     "V, so that embedding and head share a stage"},                                                              \
    {.name = "--ranks", .alias = "--dp", .value = "D",                                                             \
     .kind = CLI_NUMBER, .offset = offsetof(type, member.dp), .min = 1,                                            \
     .max = CF_MAX_RANKS, .help = "data-parallel ranks; default 1"},                                               \
    MODELLING_SPLIT_OPTIONS(type, member)

/* A model and its split, checked. */
typedef struct modelling {
    config_json config; /* if --config was read */
    cf_model model;
    cf_parallel parallel;
    int64_t *layers;    /* of --stage-layers */
    int keeps_scores;   /* 1: attention is not fused */
} modelling;

/* Makes a model and its split from options. `command` is named in messages. Returns an exit code; after CLI_OK call
   modelling_free. */
int modelling_make(const char *command, const modelling_options *asked, modelling *out);

/* Returns the ZeRO level of --zero in the form of cf_tune_desc.parallel.zero with n_gpus: 0: not given, so it is
   searched; -1: level 0. */
int64_t modelling_asked_zero(const modelling_options *asked);
void modelling_free(modelling *m);

/* Names of the known models and GPUs, for the help. */
#define MODELLING_NAMES                                                                                     \
    "models\n"                                                                                              \
    "  qwen2.5-0.5b 1.5b 3b 7b 14b 32b 72b, qwen3-0.6b 1.7b 4b 8b 14b 32b, llama-3-8b 70b, llama-3.1-405b,\n" \
    "  llama-3.2-1b 3b; qwen3-30b-a3b 235b-a22b, qwen3-coder-480b-a35b, qwen3-next-80b-a3b,\n"               \
    "  qwen3.5-27b 35b-a3b 122b-a10b 397b-a17b, gpt-oss-20b 120b, deepseek-v3,\n"                            \
    "  glm-4.5, glm-4.5-air, kimi-k2, kimi-linear-48b-a3b, llama-4-scout, llama-4-maverick, mixtral-8x7b 8x22b,\n" \
    "  nemotron-3-nano-30b-a3b. Others: --config.\n"
#define MODELLING_GPUS                                                                                      \
    "GPUs\n  a100-40g, a100-80g, h100-80g, h200; unmeasured, from data sheets: b200, gb200, b300, gb300,\n"  \
    "  gh200-96g, h800-80g, a800-80g, h20, mi300x, mi355x, l40s, rtx4090, rtx5090, rtx-pro-6000;\n"          \
    "  the beginning of a name is enough if no other one begins so;\n"                                        \
    "  or a file such as {\"like\": \"h100-80g\", \"bandwidth\": 2.4e12}\n"                                  \
    "  with members of cf_gpu (chunkflow_tune.h)\n"

/* Options that name a GPU and its numbers. */
typedef struct gpu_options {
    const char *name;
    int64_t per_node; /* 0: not given */
    int64_t launch;   /* in millionths; -1: not given */
} gpu_options;

#define GPU_DEFAULTS {.launch = -1}

/* The entries of an option table; `needed` says when --gpu is required. */
#define GPU_OPTIONS(type, member, needed)                                                                          \
    {.name = "--gpu", NEEDS_MODEL,                                                                                 \
     .value = "NAME|FILE.json", .kind = CLI_TEXT, .offset = offsetof(type, member.name),                           \
     .help = "whose numbers; " needed},                                                                            \
    {.name = "--gpus-per-node", .needs = "--gpu",                                                                  \
     .value = "N", .kind = CLI_NUMBER, .offset = offsetof(type, member.per_node),                                  \
     .min = 1, .max = CF_MAX_RANKS, .help = "default 8"},                                                          \
    {.name = "--launch", .needs = "--gpu",                                                                         \
     .value = "S", .kind = CLI_MILLIONTHS, .offset = offsetof(type, member.launch),                                \
     .max = 1000000,                                                                                               \
     .help = "seconds lost around each kernel; default 0.000005. Trainers in\n"                                    \
     "Python are nearer to 0.00002 .. 0.00004, and 2.75 times that\nwhere a Grace launches"}

/* The entry of an option table; CF_TUNE_RESERVE is its default. */
#define RESERVE_OPTION(type, member)                                                                               \
    {.name = "--reserve", .needs = "--gpu",                                                                        \
     .value = "PERCENT", .kind = CLI_NUMBER, .offset = offsetof(type, member), .max = 99,                          \
     .help = "of the GPU's memory that stay free, because formulas say too\n"                                      \
     "little rather than too much; default 9"}

/* Finds a GPU by name, or reads a file with the members of cf_gpu that differ from the GPU named by `like`. Returns an
   exit code; out->name lives as long as `name`. */
int modelling_find_gpu(const char *command, const char *name, cf_gpu *out);

/* Finds a GPU by name or file, and applies --launch. Returns an exit code. */
int modelling_take_gpu(const char *command, const gpu_options *asked, cf_gpu *out);

/* Returns words to follow the launch time: which trainers should give --launch, or "" if it was given. */
const char *modelling_launch_hint(const gpu_options *asked);

/* Options for counting memory. */
typedef struct term_options {
    int64_t loss;
    int unfused, lora_experts;
    int64_t outputs; /* index in the choice gpu|host; 0: none are kept */
    int64_t offload; /* index in the choice optimizer|parameters */
    int offload_checkpoints;
    int64_t state_gradient, runtime, fragmentation, optimizer, lora;
} term_options;

#define TERM_DEFAULTS {.fragmentation = CF_FRAGMENTATION}

/* The entries of an option table. */
#define TERM_OPTIONS(type, member)                                                                                 \
    {.name = "--loss", NEEDS_MODEL, .value = "parallel|eager|fused|chunked", .kind = CLI_CHOICE,                   \
     .offset = offsetof(type, member.loss),                                                                        \
     .help = "how the loss treats logits: as Megatron-LM, as plain PyTorch, in\n"                                  \
     "place, or a few rows at a time, as TRL and Liger (the default)"},                                            \
    {.name = "--unfused", NEEDS_MODEL, .kind = CLI_FLAG, .offset = offsetof(type, member.unfused),                 \
     .help = "norms, rotation and SwiGLU as separate operations, also in times"},                                  \
    OUTPUTS_OPTION(type, member.outputs),                                                                          \
    OFFLOAD_OPTIONS(type, member.offload, member.offload_checkpoints),                                             \
    {.name = "--state-gradient", NEEDS_MODEL, .value = "bf16|float", .kind = CLI_CHOICE,                           \
     .offset = offsetof(type, member.state_gradient),                                                              \
     .help = "type of the gradients of K and V; default float"},                                                   \
    {.name = "--optimizer", NEEDS_MODEL, .value = "adam|adam8|muon", .kind = CLI_CHOICE,                           \
     .offset = offsetof(type, member.optimizer),                                                                   \
     .help = "bytes of its states: 12 a parameter (the default), 6 with moments\n"                                 \
     "of 8 bits, or 8 of matrices and 12 of all else"},                                                            \
    {.name = "--lora", NEEDS_MODEL,                                                                                \
     .value = "RANK", .kind = CLI_NUMBER, .offset = offsetof(type, member.lora), .min = 1,                         \
     .max = CF_MAX_WIDTH,                                                                                          \
     .help = "adapters of this rank are trained and nothing else (memory only:\n"                                  \
     "times are those of training all)"},                                                                          \
    {.name = "--lora-experts", .needs = "--lora", .kind = CLI_FLAG, .offset = offsetof(type, member.lora_experts), \
     .help = "with --lora: routed experts also have adapters"},                                                    \
    {.name = "--runtime", NEEDS_MODEL,                                                                             \
     .value = "BYTES", .kind = CLI_NUMBER, .offset = offsetof(type, member.runtime),                               \
     .min = 1, .max = INT64_MAX / 1000,                                                                            \
     .help = "what no formula covers: context, libraries, NCCL; default 2G"},                                      \
    {.name = "--fragmentation", NEEDS_MODEL, .value = "PERCENT", .kind = CLI_NUMBER,                               \
     .offset = offsetof(type, member.fragmentation), .max = 1000,                                                  \
     .help = "of activations and the like, lost in gaps; default 10"}

#define OUTPUTS_OPTION(type, member)                                                                               \
    {.name = "--outputs", .value = "gpu|host", .kind = CLI_CHOICE, .offset = offsetof(type, member),               \
     .help = "dropped chunks keep attention's outputs there, so that a local\n"                                    \
     "replay does not attend: in bytes and times; default: they do not"}

#define OFFLOAD_OPTIONS(type, member, checkpoints)                                                                 \
    {.name = "--offload", NEEDS_MODEL, .value = "optimizer|parameters", .kind = CLI_CHOICE,                        \
     .offset = offsetof(type, member),                                                                             \
     .help = "these lie in host memory, parameters with optimizer states and\n"                                    \
     "with ZeRO 3 only: in bytes, and in times as far as PCIe is the limit"},                                      \
    {.name = "--offload-checkpoints", NEEDS_MODEL, .kind = CLI_FLAG, .offset = offsetof(type, checkpoints),        \
     .help = "what --recompute full keeps lies in host memory"}

/* Returns cf_memory_desc.offload for the two options. */
int modelling_offload(int64_t offload, int checkpoints);

#define STREAM_OPTION(type, member)                                                                                \
    {.name = "--stream", NEEDS_MODEL,                                                                              \
     .value = "BYTES", .kind = CLI_NUMBER, .offset = offsetof(type, member), .min = 1,                             \
     .max = INT64_MAX / 1000,                                                                                      \
     .help = "state is in host memory, as attention's outputs then are, and passes\n"                              \
     "through a ring of these bytes on each GPU, one layer at a time, in\n"                                        \
     "three blocks of rows; default: it stays on the GPUs"}

/* Returns the input for cf_cost_estimate: this model and split on a GPU. */
cf_cost_desc modelling_costs(const modelling *m, const cf_gpu *gpu, const gpu_options *asked, int64_t chunk_size);

/* Fills in the members that these options set. */
void modelling_take_terms(const term_options *asked, cf_memory_desc *out);

/* Returns the bytes of a ring's row: a row of the layer with the most state, gradient included. */
int64_t modelling_row_bytes(const cf_memory_desc *desc);

/* Sets the window of a ring of at most `bytes` on each GPU, divided into CF_STATE_SLOTS blocks of whole rows; 0: no
   ring. Takes model and split from *out, and fills in its other members. Returns an exit code. */
int modelling_take_stream(const char *command, int64_t bytes, cf_memory_desc *out);

/* ----------------------------------------------------------------------------------------------------------------
   Output
   ---------------------------------------------------------------------------------------------------------------- */

double modelling_gib(int64_t bytes);

/* Print "model qwen2.5-7b: 7,615,616,512 parameters"; the second also prints the split and what is recomputed. */
void modelling_print_model(const modelling *m);
void modelling_print(const modelling *m);

/* Returns words such as " (ZeRO 1)"; "" if there are no ranks to divide anything among. */
const char *modelling_zero_words(const cf_parallel *p);

/* FLOPs of training, forward and backward. Per token: six for each weight that multiplies a token. Per pair: twelve for
   each column of Q and visible pair of rows, or rows in a window (two products of two FLOPs, and twice that in
   backward). A recurrent layer takes three times its forward. Zeros if the parameters are too many to be counted. */
typedef struct modelling_flops {
    double per_token, per_pair;
} modelling_flops;

modelling_flops modelling_flops_of(const cf_model *model);

/* Returns "mlp", or "mlp in 5 layers of each stage"; 0 is "as little as memory requires". */
const char *modelling_recompute_words(cf_recompute recompute, int64_t layers);

/* Returns ", checkpoints in host memory", or "". offload: cf_memory_desc.offload. */
const char *modelling_offload_words(int offload);

/* Prints "stream 3 blocks of 682 rows of one layer on each GPU", or nothing without a stream. */
void modelling_print_stream(const cf_memory_desc *desc);

/* Printed beside it where there are cp groups. */
#define MODELLING_CP_STREAM "                  It streams the states of cp groups, which the C trainer refuses"

/* Write the members that describe a model and its split, a split alone, and the terms of a memory report. */
void modelling_write(json_writer *w, const modelling *m);
void modelling_write_split(json_writer *w, const cf_parallel *parallel);
void modelling_write_terms(json_writer *w, const cf_memory_report *report);

#endif /* CHUNKFLOW_MODELLING_H */
