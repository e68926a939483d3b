/* modelling.c - a model and how it is split over GPUs, from options. */

#include "modelling.h"
#include "packing.h"

#include <stdlib.h>
#include <string.h>

/* ----------------------------------------------------------------------------------------------------------------
   Options
   ---------------------------------------------------------------------------------------------------------------- */

static void override(int64_t given, int64_t *member) {
    if (given > 0) *member = given;
}

/* The sizes that a model cannot be without. */
static const char *missing_size(const cf_model *model) {
    if (model->layers == 0) return "--layers";
    if (model->hidden == 0) return "--hidden";
    if (model->heads == 0) return "--heads";
    if (model->ffn == 0) return "--ffn";
    if (model->vocab == 0) return "--vocab";
    return NULL;
}

static int make_model(const char *command, const modelling_options *asked, modelling *out) {
    const char *missing;
    int code;

    if (asked->model && asked->config) return cli_usage(command, "--model and --config exclude each other");
    out->model.name = "custom";
    if (asked->model) {
        const cf_model *named = cf_model_find(asked->model);
        if (!named) return cli_usage(command, "--model: there is no '%s'", asked->model);
        out->model = *named;
    }
    if (asked->config) {
        if ((code = config_json_read(asked->config, &out->config)) != CLI_OK) return code;
        out->model = out->config.model;
    }
    override(asked->layers, &out->model.layers);
    override(asked->hidden, &out->model.hidden);
    override(asked->heads, &out->model.heads);
    override(asked->kv_heads, &out->model.kv_heads);
    override(asked->head_dim, &out->model.head_dim);
    override(asked->ffn, &out->model.ffn);
    override(asked->vocab, &out->model.vocab);
    out->model.tied |= asked->tied;
    out->model.qkv_bias |= asked->qkv_bias;
    out->model.qk_norm |= asked->qk_norm;
    out->model.no_gate |= asked->no_gate;
    missing = missing_size(&out->model);
    if (missing) return cli_usage(command, "wanted --model NAME, --config FILE, or all sizes; %s is missing", missing);
    if (out->model.kv_heads == 0) out->model.kv_heads = out->model.heads;
    return CLI_OK;
}

/* "7,9,9,7" to as many numbers as there are stages. */
static int parse_layers(const char *command, const char *text, modelling *out) {
    int64_t count = (out->parallel.pp > 0 ? out->parallel.pp : 1) *
                    (out->parallel.n_virtual > 0 ? out->parallel.n_virtual : 1);
    int64_t i;

    out->layers = (int64_t *)calloc((size_t)count, sizeof *out->layers);
    if (!out->layers) return cli_failed("out of memory");
    for (i = 0; i < count; i++) {
        size_t n = strcspn(text, ",");
        int last = i == count - 1;
        if (!cli_parse_number(text, n, &out->layers[i]) || text[n] != (last ? '\0' : ','))
            return cli_usage(command, "--stage-layers: wanted %lld numbers with commas between", (long long)count);
        text += n + !last;
    }
    out->parallel.layers = out->layers;
    return CLI_OK;
}

int modelling_make(const char *command, const modelling_options *asked, modelling *out) {
    cf_error error;
    int code;

    memset(out, 0, sizeof *out);
    out->parallel.tp = asked->tp;
    out->parallel.pp = asked->pp;
    out->parallel.n_virtual = asked->n_virtual;
    out->parallel.dp = asked->dp;
    out->parallel.zero = asked->zero;
    out->parallel.no_sequence = asked->no_sequence;
    out->parallel.recompute = (cf_recompute)asked->recompute;
    if (asked->pp * asked->n_virtual > CF_MAX_LAYERS)
        return cli_usage(command, "--virtual: at most %d virtual stages in all", CF_MAX_LAYERS);
    code = make_model(command, asked, out);
    if (code == CLI_OK && asked->stage_layers) code = parse_layers(command, asked->stage_layers, out);
    if (code == CLI_OK && cf_parallel_validate(&out->model, &out->parallel, &error) != CF_OK)
        code = packing_error(&error, NULL);
    if (code != CLI_OK) modelling_free(out);
    else out->parallel = cf_parallel_defaults(&out->parallel);
    return code;
}

void modelling_free(modelling *m) {
    free(m->layers);
    m->layers = NULL;
}

const cf_gpu *modelling_gpu(const char *command, const char *name) {
    const cf_gpu *gpu = cf_gpu_find(name);
    if (!gpu) (void)cli_usage(command, "--gpu: there is no '%s'; wanted a100-40g, a100-80g, h100-80g or h200", name);
    return gpu;
}

void modelling_print(const modelling *m) {
    const cf_parallel *p = &m->parallel;
    cf_parameters counted;
    cf_error error;

    if (cf_model_parameters(&m->model, &counted, &error) != CF_OK) counted.total = 0;
    printf("model             %s: %s parameters\n", m->model.name, cli_commas(counted.total));
    printf("split             tensor %s, pipeline %s", cli_commas(p->tp), cli_commas(p->pp));
    if (p->n_virtual > 1) printf(" with %s virtual stages each", cli_commas(p->n_virtual));
    printf(", data %s (ZeRO %s): %s GPUs\n", cli_commas(p->dp), cli_commas(p->zero), cli_commas(p->tp * p->pp * p->dp));
    printf("recompute         %s%s\n", cf_recompute_name(p->recompute),
           p->tp > 1 ? p->no_sequence ? ", no sequence parallelism" : ", sequence parallelism" : "");
}

/* ----------------------------------------------------------------------------------------------------------------
   JSON
   ---------------------------------------------------------------------------------------------------------------- */

static void put(json_writer *w, const char *text) { (void)cli_write(text, strlen(text), w->to); }

/* The comma and the line end before a member, and its key. */
static void begin_member(json_writer *w, const char *key) {
    put(w, w->inside ? ",\n" : "\n");
    w->inside = 1;
    if (!key) return;
    put(w, "\"");
    put(w, key);
    put(w, "\": ");
}

void json_open(json_writer *w, const char *key, char bracket) {
    char text[2] = {0, 0};
    if (key || w->inside) begin_member(w, key);
    text[0] = bracket;
    put(w, text);
    w->inside = 0;
}

void json_close(json_writer *w, char bracket) {
    char text[3] = {'\n', 0, 0};
    text[1] = bracket;
    put(w, text);
    w->inside = 1;
}

void json_integer_member(json_writer *w, const char *key, int64_t value) {
    char text[32];
    begin_member(w, key);
    snprintf(text, sizeof text, "%lld", (long long)value);
    put(w, text);
}

void json_number_member(json_writer *w, const char *key, double value) {
    char text[40];
    begin_member(w, key);
    snprintf(text, sizeof text, "%.17g", value);
    put(w, text);
}

void json_text_member(json_writer *w, const char *key, const char *value) {
    begin_member(w, key);
    put(w, "\"");
    for (; *value; value++) {
        char text[2] = {'?', 0};
        if (*value >= 32 && *value < 127 && *value != '"' && *value != '\\') text[0] = *value;
        put(w, text);
    }
    put(w, "\"");
}

void modelling_write(json_writer *w, const modelling *m) {
    cf_parameters counted;

    json_text_member(w, "model", m->model.name);
    if (cf_model_parameters(&m->model, &counted, NULL) == CF_OK)
        json_integer_member(w, "parameters", counted.total);
    json_integer_member(w, "tensor_parallel", m->parallel.tp);
    json_integer_member(w, "pipeline_parallel", m->parallel.pp);
    json_integer_member(w, "virtual_stages", m->parallel.n_virtual);
    json_integer_member(w, "data_parallel", m->parallel.dp);
    json_integer_member(w, "zero", m->parallel.zero);
    json_integer_member(w, "sequence_parallel", m->parallel.tp > 1 && !m->parallel.no_sequence);
    json_text_member(w, "recompute", cf_recompute_name(m->parallel.recompute));
}
