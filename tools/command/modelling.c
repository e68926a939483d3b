/* modelling.c - a model and its split over GPUs, from options. */

#include "modelling.h"
#include "json_read.h"

#include <ctype.h>
#include <stdlib.h>
#include <string.h>

/* ----------------------------------------------------------------------------------------------------------------
   Options
   ---------------------------------------------------------------------------------------------------------------- */

static void override(int64_t given, int64_t *member) {
    if (given > 0) *member = given;
}

/* Returns the name of a missing size of a model; NULL if it has all. */
static const char *missing_size(const cf_model *model) {
    if (model->layers == 0) return "--layers";
    if (model->hidden == 0) return "--hidden";
    if (model->heads == 0) return "--heads";
    if (model->ffn == 0) return "--ffn";
    if (model->vocab == 0) return "--vocab";
    return NULL;
}

/* ---- names of models ---- */

static const char *const model_names[] = {
    "qwen2.5-0.5b", "qwen2.5-1.5b", "qwen2.5-3b", "qwen2.5-7b", "qwen2.5-14b", "qwen2.5-32b", "qwen2.5-72b",
    "qwen3-0.6b", "qwen3-1.7b", "qwen3-4b", "qwen3-8b", "qwen3-14b", "qwen3-32b",
    "llama-3-8b", "llama-3-70b", "llama-3.1-405b", "llama-3.2-1b", "llama-3.2-3b",
    "qwen3-30b-a3b", "qwen3-235b-a22b", "qwen3-coder-480b-a35b", "qwen3-next-80b-a3b", "qwen3.5-27b",
    "qwen3.5-35b-a3b", "qwen3.5-122b-a10b", "qwen3.5-397b-a17b", "gpt-oss-20b", "gpt-oss-120b", "deepseek-v3",
    "glm-4.5", "glm-4.5-air", "kimi-k2", "kimi-linear-48b-a3b", "llama-4-scout", "llama-4-maverick", "mixtral-8x7b",
    "mixtral-8x22b", "nemotron-3-nano-30b-a3b", NULL};

/* Endings of the names of trained variants of one architecture, in lower case. */
static const char *const variants[] = {"-instruct", "-base", "-chat", "-hf", NULL};

static int ends_in(const char *text, size_t n, const char *end) {
    size_t length = strlen(end), i;

    if (n <= length) return 0;
    for (i = 0; i < length; i++)
        if (tolower((unsigned char)text[n - length + i]) != end[i]) return 0;
    return 1;
}

/* Returns a model's own name: "Qwen/Qwen2.5-7B-Instruct" is qwen2.5-7b. Organisation, letter case and those endings do
   not affect its sizes. */
static const char *own_name(const char *name) {
    const char *slash = strrchr(name, '/'), *own = slash ? slash + 1 : name;
    size_t n = strlen(own);
    char *text = cli_scratch();
    int i;

    for (i = 0; variants[i]; i++) {
        if (!ends_in(own, n, variants[i])) continue;
        n -= strlen(variants[i]);
        i = -1; /* another ending may precede it */
    }
    snprintf(text, CLI_SCRATCH_BYTES, "%.*s", n < CLI_SCRATCH_BYTES ? (int)n : 0, own);
    return text;
}

static int make_model(const char *command, const modelling_options *asked, modelling *out) {
    const char *missing;
    int code;

    if (asked->model && asked->config) return cli_usage(command, "--model and --config exclude each other");
    out->model.name = "custom";
    if (asked->model) {
        const cf_model *named = cf_model_find(own_name(asked->model));
        if (!named)
            return cli_refuse_name(command, "--model", asked->model, own_name(asked->model), model_names,
                                   "--config FILE");
        out->model = *named;
    }
    if (asked->config) {
        if ((code = config_json_read(asked->config, &out->config)) != CLI_OK) return code;
        out->model = config_json_take_model(&out->config);
    }
    override(asked->layers, &out->model.layers);
    override(asked->hidden, &out->model.hidden);
    override(asked->heads, &out->model.heads);
    override(asked->kv_heads, &out->model.kv_heads);
    override(asked->head_dim, &out->model.head_dim);
    override(asked->ffn, &out->model.ffn);
    override(asked->vocab, &out->model.vocab);
    override(asked->mtp, &out->model.mtp);
    out->model.tied |= asked->tied;
    out->model.qkv_bias |= asked->qkv_bias;
    if (out->model.qk_norm == 0) out->model.qk_norm = asked->qk_norm;
    out->model.no_gate |= asked->no_gate;
    missing = missing_size(&out->model);
    if (missing) return cli_usage(command, "wanted --model NAME, --config FILE, or all sizes; %s is missing", missing);
    if (out->model.kv_heads == 0) out->model.kv_heads = out->model.heads;
    return CLI_OK;
}

static int take_layers(const char *command, const char *text, modelling *out) {
    int64_t pp = out->parallel.pp > 0 ? out->parallel.pp : 1;
    int64_t n_virtual = out->parallel.n_virtual > 0 ? out->parallel.n_virtual : 1, n;
    int code = cli_take_numbers(command, "--stage-layers", text, 0, CF_MAX_LAYERS, &out->layers, &n);

    if (code != CLI_OK) return code;
    if (n != pp * n_virtual)
        return cli_usage(command, "--stage-layers: got %lld numbers, wanted %lld", (long long)n,
                         (long long)(pp * n_virtual));
    out->parallel.layers = out->layers;
    return CLI_OK;
}

int64_t modelling_asked_zero(const modelling_options *asked) {
    return asked->zero == 1 ? -1 : asked->zero > 0 ? asked->zero - 1 : 0;
}

int modelling_make(const char *command, const modelling_options *asked, modelling *out) {
    cf_error error;
    int code;

    memset(out, 0, sizeof *out);
    out->parallel.tp = asked->tp;
    out->parallel.pp = asked->pp;
    out->parallel.n_virtual = asked->n_virtual;
    out->parallel.placement = (cf_placement)asked->placement;
    out->parallel.dp = asked->dp;
    out->parallel.ep = asked->ep;
    out->parallel.imbalance = asked->imbalance;
    out->parallel.zero = asked->zero > 0 ? asked->zero - 1 : asked->dp > 1;
    out->parallel.no_sequence = asked->no_sequence;
    out->parallel.recompute = (cf_recompute)asked->recompute;
    out->parallel.recompute_layers = asked->recompute_layers;
    if (asked->pp * asked->n_virtual > CF_MAX_LAYERS)
        return cli_usage(command, "--virtual: at most %d virtual stages in all", CF_MAX_LAYERS);
    code = make_model(command, asked, out);
    if (code == CLI_OK && asked->stage_layers) code = take_layers(command, asked->stage_layers, out);
    if (code == CLI_OK && cf_parallel_validate(&out->model, &out->parallel, &error) != CF_OK)
        code = cli_error(&error, NULL);
    if (code != CLI_OK) modelling_free(out);
    else out->parallel = cf_parallel_defaults(&out->parallel);
    return code;
}

void modelling_free(modelling *m) {
    free(m->layers);
    m->layers = NULL;
}

#define GPU_REAL(key) {.name = #key, .type = JSON_REAL, .offset = offsetof(gpu_object, gpu.key), .optional = 1}
#define GPU_COUNT(key) {.name = #key, .type = JSON_COUNT, .offset = offsetof(gpu_object, gpu.key), .optional = 1}

static const char *const gpu_names[] = {"a100-40g", "a100-80g", "h100-80g", "h200", "b200", "gb200", "b300", "gb300",
                                        "gh200-96g", "h800-80g", "a800-80g", "h20", "mi300x", "mi355x", "l40s",
                                        "rtx4090", "rtx5090", "rtx-pro-6000", NULL};

typedef struct gpu_object {
    uint32_t like, name; /* `name` is for the file's readers: the printed name is the file's */
    cf_gpu gpu;
} gpu_object;

static const json_field gpu_fields[] = {
    {.name = "like", .type = JSON_TEXT_OF, .offset = offsetof(gpu_object, like), .optional = 1},
    {.name = "name", .type = JSON_TEXT_OF, .offset = offsetof(gpu_object, name), .optional = 1},
    GPU_REAL(flops), GPU_REAL(gemm), GPU_REAL(attention_forward), GPU_REAL(attention_backward), GPU_COUNT(processors),
    GPU_REAL(bandwidth), GPU_COUNT(memory), GPU_REAL(nvlink), GPU_REAL(network), GPU_REAL(pcie), GPU_REAL(link),
    GPU_REAL(launch), GPU_REAL(latency), {.name = NULL}};

static int take_gpu(const json_document *document, const char *name, cf_gpu *out) {
    gpu_object object;
    const cf_gpu *like = NULL;
    char text[CLI_SCRATCH_BYTES];
    uint64_t seen;
    int code;

    memset(&object, 0, sizeof object);
    code = json_read_object(document, 0, gpu_fields, &object, &seen);
    if (code == CLI_OK) code = json_refuse_others(document, 0, gpu_fields);
    if (code == CLI_OK && seen & 1) {
        json_copy_text(document, object.like, text, sizeof text);
        like = cf_gpu_find(text);
        if (!like)
            return json_wrong(document, object.like, "like: there is no GPU '%s'%s", text,
                              cli_guess_among(text, gpu_names));
        object.gpu = *like;
        /* the file's own members override those of `like` */
        code = json_read_object(document, 0, gpu_fields, &object, NULL);
    }
    object.gpu.name = name;
    if (code == CLI_OK) *out = object.gpu;
    return code;
}

/* Reads a GPU from a file, which is named after the file without its folder. */
static int read_gpu(const char *path, cf_gpu *out) {
    json_document document;
    int code = json_file_read(path, (size_t)1 << 20, &document);

    if (code != CLI_OK) return code;
    code = json_check(&document);
    if (code == CLI_OK) code = take_gpu(&document, cli_base_name(path), out);
    json_free(&document);
    return code;
}

/* Returns whether a name begins with a text, which begins with a letter; case and dashes do not matter. */
static int begins_with(const char *name, const char *text) {
    if (!isalpha((unsigned char)*text)) return 0;
    for (; *text; text++) {
        if (*text == '-') continue;
        while (*name == '-') name++;
        if (*name == '\0' || tolower((unsigned char)*name++) != tolower((unsigned char)*text)) return 0;
    }
    return 1;
}

int modelling_find_gpu(const char *command, const char *name, cf_gpu *out) {
    const cf_gpu *gpu = cf_gpu_find(name);
    char meant[512] = "";
    int i, count = 0;

    for (i = 0; !gpu && gpu_names[i]; i++)
        if (begins_with(gpu_names[i], name))
            snprintf(meant + strlen(meant), sizeof meant - strlen(meant), "%s%s", count++ ? " or " : "", gpu_names[i]);
    if (count > 1) return cli_usage(command, "--gpu: '%s' may be %s", name, meant);
    if (count == 1) gpu = cf_gpu_find(meant);
    if (!gpu && strchr(name, '.')) return read_gpu(name, out);
    if (!gpu) return cli_refuse_name(command, "--gpu", name, name, gpu_names, "FILE.json");
    *out = *gpu;
    return CLI_OK;
}

int modelling_take_gpu(const char *command, const gpu_options *asked, cf_gpu *out) {
    int code = modelling_find_gpu(command, asked->name, out);

    if (code != CLI_OK) return code;
    if (asked->launch >= 0) out->launch = (double)asked->launch / 1e6;
    return CLI_OK;
}

cf_cost_desc modelling_costs(const modelling *m, const cf_gpu *gpu, const gpu_options *asked, int64_t chunk_size) {
    cf_cost_desc desc;

    memset(&desc, 0, sizeof desc);
    desc.model = &m->model;
    desc.gpu = gpu;
    desc.parallel = m->parallel;
    desc.gpus_per_node = asked->per_node;
    desc.chunk_size = chunk_size;
    return desc;
}

const char *modelling_launch_hint(const gpu_options *asked) {
    return asked->launch >= 0 ? "" : " (fused, launched from C; in Python take --launch 0.00002 to 0.00004)";
}

int modelling_offload(int64_t offload, int checkpoints) {
    static const int parts[] = {0, CF_OFFLOAD_OPTIMIZER, CF_OFFLOAD_OPTIMIZER | CF_OFFLOAD_PARAMETERS};

    return parts[offload] | (checkpoints ? CF_OFFLOAD_CHECKPOINTS : 0);
}

const char *modelling_offload_words(int offload) {
    return offload & CF_OFFLOAD_CHECKPOINTS ? ", checkpoints in host memory" : "";
}

void modelling_take_terms(const term_options *asked, cf_memory_desc *out) {
    out->loss = (cf_loss)asked->loss;
    out->unfused = asked->unfused;
    out->outputs = (int)asked->outputs;
    out->offload = modelling_offload(asked->offload, asked->offload_checkpoints);
    out->state_gradient_bytes = asked->state_gradient == 1 ? 2 : 4;
    if (asked->optimizer == 2) out->optimizer_bytes = 6;
    if (asked->optimizer == 3) out->matrix_bytes = 8;
    out->lora_rank = asked->lora;
    out->lora_experts = asked->lora_experts;
    out->runtime_bytes = asked->runtime;
    out->fragmentation = asked->fragmentation > 0 ? asked->fragmentation : -1;
}

int64_t modelling_row_bytes(const cf_memory_desc *desc) {
    cf_memory_desc full = cf_memory_defaults(desc);
    cf_shard shard;
    int64_t most = 0, k;

    for (k = 0; cf_stage_shard(full.model, &full.parallel, 0, k, &shard, NULL) == CF_OK; k++)
        if (shard.state_row > most) most = shard.state_row;
    return most * (full.state_bytes + full.state_gradient_bytes);
}

int modelling_take_stream(const char *command, int64_t bytes, cf_memory_desc *out) {
    int64_t row;

    out->state_window = 0;
    if (bytes == 0) return CLI_OK;
    row = modelling_row_bytes(out);
    if (row == 0) return cli_usage(command, "--stream: no layer of this model has a state that grows");
    if (bytes < CF_STATE_SLOTS * row)
        return cli_usage(command, "--stream: %d rows of one layer's K, V and their gradients have %s bytes here",
                         CF_STATE_SLOTS, cli_commas(CF_STATE_SLOTS * row));
    out->state_window = bytes / (CF_STATE_SLOTS * row) * CF_STATE_SLOTS;
    return CLI_OK;
}

/* ----------------------------------------------------------------------------------------------------------------
   Output
   ---------------------------------------------------------------------------------------------------------------- */

double modelling_gib(int64_t bytes) { return (double)bytes / 1073741824.0; }

void modelling_print_model(const modelling *m) {
    cf_parameters counted;

    if (cf_model_parameters(&m->model, &counted, NULL) != CF_OK) memset(&counted, 0, sizeof counted);
    printf("model             %s: %s parameters", m->model.name, cli_commas(counted.total));
    if (counted.experts > 0) printf(", %s of them active", cli_commas(counted.active));
    putchar('\n');
}

void modelling_print_stream(const cf_memory_desc *desc) {
    if (desc->state_window > 0)
        printf("stream            %d blocks of %s rows of one layer on each GPU\n", CF_STATE_SLOTS,
               cli_commas(desc->state_window / CF_STATE_SLOTS));
}

modelling_flops modelling_flops_of(const cf_model *model) {
    modelling_flops flops = {0, 0};
    cf_parallel whole = {0};
    cf_parameters counted;
    cf_shard s;
    int64_t k;

    if (cf_model_parameters(model, &counted, NULL) != CF_OK) return flops;
    flops.per_token = 6 * ((double)(counted.active - counted.embedding - counted.norms - counted.head) +
                           (double)model->hidden * (double)model->vocab);
    for (k = 0; cf_stage_shard(model, &whole, 0, k, &s, NULL) == CF_OK; k++) {
        double columns = (double)s.layers * (double)(s.q + s.out) / 2, rows;
        rows = s.mixer == CF_MIXER_CHUNKED ? (double)s.window / 2 : (double)s.window;
        if (s.state_row > 0) flops.per_pair += 12 * columns;
        else if (s.window_row > 0) flops.per_token += 12 * columns * rows;
        else flops.per_token += 3 * 6 * (double)s.layers * (double)s.snapshot;
    }
    return flops;
}

const char *modelling_recompute_words(cf_recompute recompute, int64_t layers) {
    char *text = cli_scratch();

    if (recompute == CF_RECOMPUTE_DEFAULT) return "as little as memory asks for";
    if (layers == 0 || recompute == CF_RECOMPUTE_NONE) return cf_recompute_name(recompute);
    snprintf(text, CLI_SCRATCH_BYTES, "%s in %s layers of each stage", cf_recompute_name(recompute),
             cli_commas(layers));
    return text;
}

const char *modelling_zero_words(const cf_parallel *p) {
    char *text = cli_scratch();

    snprintf(text, CLI_SCRATCH_BYTES, " (ZeRO %lld)", (long long)p->zero);
    return p->dp > 1 ? text : "";
}

void modelling_print(const modelling *m) {
    const cf_parallel *p = &m->parallel;

    modelling_print_model(m);
    printf("split             tensor %s, pipeline %s", cli_commas(p->tp), cli_commas(p->pp));
    if (p->n_virtual > 1)
        printf(" with %s virtual stages each%s", cli_commas(p->n_virtual),
               p->placement == CF_PLACEMENT_V ? ", in a V" : "");
    if (p->ep > 1) printf(", experts %s", cli_commas(p->ep));
    printf(", data %s%s: %s GPUs\n", cli_commas(p->dp), modelling_zero_words(p), cli_commas(p->tp * p->pp * p->dp));
    printf("recompute         %s%s\n", modelling_recompute_words(p->recompute, p->recompute_layers),
           p->tp > 1 ? p->no_sequence ? ", no sequence parallelism" : ", sequence parallelism" : "");
    if (p->recompute == CF_RECOMPUTE_SELECTIVE && !m->keeps_scores)
        puts("                  worth nothing: fused attention keeps no scores; layernorm and act free more for less");
}

void modelling_write(json_writer *w, const modelling *m) {
    cf_parameters counted;

    json_text_member(w, "model", m->model.name);
    if (cf_model_parameters(&m->model, &counted, NULL) == CF_OK) {
        json_integer_member(w, "parameters", counted.total);
        if (counted.experts > 0) json_integer_member(w, "active_parameters", counted.active);
    }
    modelling_write_split(w, &m->parallel);
    json_integer_member(w, "sequence_parallel", m->parallel.tp > 1 && !m->parallel.no_sequence);
    json_text_member(w, "recompute", cf_recompute_name(m->parallel.recompute));
    if (m->parallel.recompute_layers > 0) json_integer_member(w, "recompute_layers", m->parallel.recompute_layers);
}

void modelling_write_split(json_writer *w, const cf_parallel *parallel) {
    json_integer_member(w, "tensor_parallel", parallel->tp);
    json_integer_member(w, "pipeline_parallel", parallel->pp);
    json_integer_member(w, "virtual_stages", parallel->n_virtual);
    json_text_member(w, "placement", cf_placement_name(parallel->placement));
    json_integer_member(w, "data_parallel", parallel->dp);
    if (parallel->ep > 1) json_integer_member(w, "expert_parallel", parallel->ep);
    json_integer_member(w, "zero", parallel->zero);
}

void modelling_write_terms(json_writer *w, const cf_memory_report *report) {
#define WRITE_TERM(name, text) json_integer_member(w, #name, report->name);
    CF_MEMORY_TERMS(WRITE_TERM)
#undef WRITE_TERM
}
