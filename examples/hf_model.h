/* hf_model.h - a decoder's weights from a Hugging Face folder, and back - MIT or public domain

   A folder holds config.json and model.safetensors, or the files that model.safetensors.index.json names. config.json
   is read as the chunkflow command reads one; only models built like Qwen2.5 are accepted. Written are one
   model.safetensors, or as many files as needed and their index, together with the config.json that was read, or a new
   one for a model that was not. */

#ifndef TRAIN_HF_MODEL_H
#define TRAIN_HF_MODEL_H

#include "decoder_cuda.h"
#include "safetensors.h"

#include <errno.h>

extern "C" {
#include "../tools/command/config_json.h"
}

#define HF_MAX_PARTS 256
#define HF_MAX_CONFIG ((size_t)16 << 20)

typedef struct hf_model {
    char *folder;
    char *config; /* text of config.json, written back unchanged */
    char *paths[HF_MAX_PARTS];
    safetensors parts[HF_MAX_PARTS];
    int64_t n_parts;
} hf_model;

static void hf_model_free(hf_model *m) {
    for (int64_t i = 0; i < m->n_parts; i++) {
        safetensors_close(&m->parts[i]);
        free(m->paths[i]);
    }
    free(m->folder);
    free(m->config);
    memset(m, 0, sizeof *m);
}

static char *path_in(const char *folder, const char *name) {
    const size_t bytes = strlen(folder) + strlen(name) + 2;
    char *path = TAKE(char, (int64_t)bytes);
    snprintf(path, bytes, "%s/%s", folder, name);
    return path;
}

static void must_read(int code) {
    if (code != CLI_OK) fail(code == CLI_FAILED ? EXIT_CHECK_FAILED : EXIT_BAD_INPUT, "the model cannot be used");
}

/* ---- config.json ---- */

/* The members of a config that planning does not need. */
typedef struct config_rest {
    double rope_theta, norm_epsilon;
    uint32_t activation;
    int sliding_window;
} config_rest;

static int read_config_rest(const json_document *document, model_config *out) {
    static const json_field fields[] = {
        {"rope_theta", JSON_REAL, offsetof(config_rest, rope_theta), 1, 1, NULL},
        {"rms_norm_eps", JSON_REAL, offsetof(config_rest, norm_epsilon), 1, 1, NULL},
        {"hidden_act", JSON_TEXT_OF, offsetof(config_rest, activation), 1, 1, NULL},
        {"use_sliding_window", JSON_BOOL, offsetof(config_rest, sliding_window), 1, 1, NULL},
        {NULL, JSON_INT, 0, 0, 0, NULL}};
    config_rest rest = {10000, 1e-6, 0, 0}; /* Hugging Face's defaults for missing members */
    char activation[16] = "silu";
    const int code = json_read_object(document, 0, fields, &rest, NULL);
    if (code != CLI_OK) return code;
    if (rest.activation) json_copy_text(document, rest.activation, activation, sizeof activation);
    if (strcmp(activation, "silu") != 0) return json_wrong(document, 0, "hidden_act: only silu is possible");
    if (rest.sliding_window) return json_wrong(document, 0, "use_sliding_window: only full attention is possible");
    if (member_of(document, 0, "rope_scaling", JSON_OBJECT))
        return json_wrong(document, 0, "rope_scaling: only plain rotary positions are possible");
    if (!(rest.rope_theta > 0) || !(rest.norm_epsilon >= 0))
        return json_wrong(document, 0, "rope_theta and rms_norm_eps must not be negative");
    out->rope_theta = rest.rope_theta;
    out->norm_epsilon = rest.norm_epsilon;
    return CLI_OK;
}

/* Returns NULL, or the reason why the decoder cannot run this model. */
static const char *architecture_fault(const cf_model *m) {
    if (!m->qkv_bias || m->out_bias || m->mlp_bias || m->qk_norm || m->no_gate || m->kinds)
        return "it is built otherwise than Qwen2.5";
    return m->head_dim > 0 && m->head_dim * m->heads != m->hidden ? "its heads do not make up its width" : NULL;
}

static void model_from(model_config *c, const cf_model *m) {
    c->vocabulary = m->vocab;
    c->layers = m->layers;
    c->hidden = m->hidden;
    c->heads = m->heads;
    c->kv_heads = m->kv_heads;
    c->ffn = m->ffn;
    c->untied = !m->tied;
}

/* Reads the folder's config.json into *c. */
static void hf_read_config(hf_model *m, const char *folder, model_config *c) {
    config_json described;
    json_document document;
    size_t bytes;
    char *path = path_in(folder, "config.json");
    m->folder = path_in(folder, "");
    must_read(config_json_read(path, &described));
    must_read(cli_file_read(path, HF_MAX_CONFIG, &m->config, &bytes));
    must_read(json_parse(path, m->config, bytes, &document));
    const char *fault = architecture_fault(&described.model);
    must_read(fault ? json_wrong(&document, 0, "%s", fault) : CLI_OK);
    must_read(read_config_rest(&document, c));
    model_from(c, &described.model);
    json_free(&document);
    free(path);
}

/* ---- weights in ---- */

static void open_part(hf_model *m, const char *name) {
    if (m->n_parts == HF_MAX_PARTS) fail(EXIT_BAD_INPUT, "%s: more than %d parts", m->folder, HF_MAX_PARTS);
    m->paths[m->n_parts] = path_in(m->folder, name);
    must_read(safetensors_open(m->paths[m->n_parts], &m->parts[m->n_parts]));
    m->n_parts++;
}

/* Returns the file that has this tensor, or NULL. */
static const safetensors *find_part(const hf_model *m, const char *name) {
    for (int64_t i = 0; i < m->n_parts; i++)
        if (strcmp(strrchr(m->paths[i], '/') + 1, name) == 0) return &m->parts[i];
    return NULL;
}

/* Checks that every tensor is in the file that the map names, and in no other one. */
static void check_index(const hf_model *m, const json_document *d, uint32_t map) {
    char name[SAFETENSORS_NAME], file[SAFETENSORS_NAME];
    uint32_t at = map + 1;
    const int64_t mapped = json_count(d, map);
    int64_t found = 0;
    for (int64_t i = 0; i < mapped; i++, at = d->nodes[at + 1].next) {
        json_copy_text(d, at, name, sizeof name);
        json_copy_text(d, at + 1, file, sizeof file);
        if (!safetensors_find(find_part(m, file), name))
            must_read(json_wrong(d, at, "tensor %s: it is not in %s", name, file));
    }
    for (int64_t i = 0; i < m->n_parts; i++) found += m->parts[i].count;
    if (found != mapped)
        must_read(json_wrong(d, map, "the files have %lld tensors, it names %lld: one is there twice, or not named",
                             (long long)found, (long long)mapped));
}

/* Opens every file that the index names. */
static void open_indexed(hf_model *m, const char *index) {
    json_document d;
    char *text, name[SAFETENSORS_NAME];
    size_t bytes;
    must_read(cli_file_read(index, HF_MAX_CONFIG, &text, &bytes));
    must_read(json_parse(index, text, bytes, &d));
    must_read(json_check(&d));
    const uint32_t map = d.nodes[0].kind == JSON_OBJECT ? member_of(&d, 0, "weight_map", JSON_OBJECT) : 0;
    must_read(map ? CLI_OK : json_wrong(&d, 0, "wanted an object with a weight_map"));
    uint32_t at = map + 1;
    for (int64_t i = json_count(&d, map); i > 0; i--, at = d.nodes[at + 1].next) {
        must_read(d.nodes[at + 1].kind == JSON_STRING ? CLI_OK : json_wrong(&d, at, "wanted the name of a file"));
        json_copy_text(&d, at + 1, name, sizeof name);
        must_read(strchr(name, '/') ? json_wrong(&d, at, "a file outside of the folder") : CLI_OK);
        if (!find_part(m, name)) open_part(m, name);
    }
    check_index(m, &d, map);
    json_free(&d);
    free(text);
}

static void open_parts(hf_model *m) {
    struct stat status;
    char *index = path_in(m->folder, "model.safetensors.index.json");
    if (stat(index, &status) == 0) open_indexed(m, index);
    else open_part(m, "model.safetensors");
    free(index);
}

/* Refuses tensors that the model has no place for, because they would be lost on saving. */
static void refuse_strangers(const hf_model *m, const decoder *d) {
    for (int64_t i = 0; i < m->n_parts; i++) {
        const safetensors *s = &m->parts[i];
        for (int64_t k = 0; k < s->count; k++) {
            int64_t own = 0;
            while (own < d->n_tensors && strcmp(d->tensors[own].name, s->tensors[k].name) != 0) own++;
            if (own == d->n_tensors) must_read(tensor_wrong(s, &s->tensors[k], "the model has no such tensor"));
        }
    }
}

#define HF_PIECE ((int64_t)16 << 20) /* numbers read at a time */

static void load_tensor(const hf_model *m, const decoder *d, const decoder_tensor *t, float *buffer) {
    int64_t which = 0;
    while (which + 1 < m->n_parts && !safetensors_find(&m->parts[which], t->name)) which++;
    const safetensors *s = &m->parts[which];
    const safetensor *found = safetensors_want(s, t->name, t->rows, t->columns);
    must_read(found ? CLI_OK : CLI_WRONG);
    for (int64_t first = 0; first < tensor_count(t); first += HF_PIECE) {
        const int64_t count = min_of(HF_PIECE, tensor_count(t) - first);
        must_read(safetensors_read(s, found, first, count, buffer));
        upload(d->master + t->offset + first, buffer, count);
    }
}

/* Loads the model's weights from the folder whose config.json was read. */
template <typename T> static void hf_load(hf_model *m, const decoder *d) {
    float *buffer = TAKE(float, HF_PIECE);
    open_parts(m);
    refuse_strangers(m, d);
    for (int64_t i = 0; i < d->n_tensors; i++) load_tensor(m, d, &d->tensors[i], buffer);
    round_parameters<T>(d);
    free(buffer);
}

/* ---- weights out ---- */

template <typename T>
static void fetch_parameters(void *user, int64_t index, int64_t first, int64_t bytes, void *to) {
    const decoder *d = (const decoder *)user;
    const char *from = (const char *)((const T *)d->parameters + d->tensors[index].offset);
    MUST_CUDA(cudaMemcpy(to, from + first, (size_t)bytes, cudaMemcpyDeviceToHost));
}

static void print_config(char *to, size_t room, const model_config *c, tensor_dtype dtype) {
    snprintf(to, room,
             "{\n  \"architectures\": [\"Qwen2ForCausalLM\"],\n  \"hidden_act\": \"silu\",\n  \"hidden_size\": %lld,\n"
             "  \"intermediate_size\": %lld,\n  \"model_type\": \"qwen2\",\n  \"num_attention_heads\": %lld,\n"
             "  \"num_hidden_layers\": %lld,\n  \"num_key_value_heads\": %lld,\n  \"rms_norm_eps\": %.17g,\n"
             "  \"rope_theta\": %.17g,\n  \"tie_word_embeddings\": %s,\n  \"torch_dtype\": \"%s\",\n"
             "  \"vocab_size\": %lld\n}\n",
             (long long)c->hidden, (long long)c->ffn, (long long)c->heads, (long long)c->layers, (long long)c->kv_heads,
             c->norm_epsilon, c->rope_theta, c->untied ? "false" : "true", dtype == TENSOR_F32 ? "float32" : "bfloat16",
             (long long)c->vocabulary);
}

static void write_config(const hf_model *m, const decoder *d, const char *folder, tensor_dtype dtype) {
    char own[1024], *path = path_in(folder, "config.json");
    cli_output output;
    memset(&output, 0, sizeof output);
    print_config(own, sizeof own, d->config, dtype);
    const char *text = m->config ? m->config : own;
    int code = cli_output_open(&output, path);
    if (code == CLI_OK) {
        cli_write(text, strlen(text), &output);
        code = cli_outputs_finish(&output, 1, CLI_OK);
    }
    if (code != CLI_OK) fail(EXIT_CHECK_FAILED, "%s cannot be written", path);
    free(path);
}

/* The tensors to write, in the model's order, and the file of each. */
typedef struct hf_parts {
    tensor_source *sources; /* (n) part by part */
    int64_t n, n_parts, bytes;
    int64_t *first;         /* (n_parts + 1) */
} hf_parts;

/* Divides the tensors into files. A file ends where the next tensor would make it larger than `most` bytes; a larger
   tensor has its own file. The last file that a reader accepts has all the rest. */
static hf_parts hf_parts_new(const decoder *d, tensor_dtype dtype, int64_t most) {
    hf_parts p = {TAKE(tensor_source, d->n_tensors), d->n_tensors, 0, 0, TAKE(int64_t, d->n_tensors + 1)};
    int64_t held = 0;
    for (int64_t i = 0; i < p.n; i++) {
        p.sources[i] = {d->tensors[i].name, d->tensors[i].rows, d->tensors[i].columns, i};
        const int64_t bytes = source_bytes(&p.sources[i], dtype);
        if (held > 0 && bytes > most - held && p.n_parts < HF_MAX_PARTS - 1) {
            p.first[++p.n_parts] = i;
            held = 0;
        }
        held += bytes;
        p.bytes += bytes;
    }
    p.first[++p.n_parts] = p.n;
    return p;
}

static void hf_parts_free(hf_parts *p) {
    free(p->sources);
    free(p->first);
}

/* Names a file as Hugging Face does. */
static void part_name(char *to, size_t room, const hf_parts *p, int64_t which) {
    if (p->n_parts == 1) snprintf(to, room, "model.safetensors");
    else snprintf(to, room, "model-%05lld-of-%05lld.safetensors", (long long)which + 1, (long long)p->n_parts);
}

/* A line of the index: a tensor and its file. Lines are sorted by tensor. */
typedef struct index_line {
    const char *name;
    int64_t file;
} index_line;

static int compare_lines(const void *a, const void *b) {
    return strcmp(((const index_line *)a)->name, ((const index_line *)b)->name);
}

static index_line *index_lines(const hf_parts *p) {
    index_line *lines = TAKE(index_line, p->n);
    for (int64_t which = 0; which < p->n_parts; which++)
        for (int64_t i = p->first[which]; i < p->first[which + 1]; i++) lines[i] = {p->sources[i].name, which};
    qsort(lines, (size_t)p->n, sizeof *lines, compare_lines);
    return lines;
}

static void write_text(const char *text, cli_output *output) { cli_write(text, strlen(text), output); }

static void write_index(const hf_parts *p, const char *path) {
    char text[SAFETENSORS_NAME + 80], file[64];
    cli_output output;
    memset(&output, 0, sizeof output);
    index_line *lines = index_lines(p);
    int code = cli_output_open(&output, path);
    if (code == CLI_OK) {
        snprintf(text, sizeof text, "{\n  \"metadata\": {\n    \"total_size\": %lld\n  },\n  \"weight_map\": {\n",
                 (long long)p->bytes);
        write_text(text, &output);
        for (int64_t i = 0; i < p->n; i++) {
            part_name(file, sizeof file, p, lines[i].file);
            snprintf(text, sizeof text, "    \"%s\": \"%s\"%s\n", lines[i].name, file, i + 1 < p->n ? "," : "");
            write_text(text, &output);
        }
        write_text("  }\n}\n", &output);
        code = cli_outputs_finish(&output, 1, CLI_OK);
    }
    if (code != CLI_OK) fail(EXIT_CHECK_FAILED, "%s cannot be written", path);
    free(lines);
}

static void remove_if_there(const char *path) {
    if (remove(path) != 0 && errno != ENOENT) fail(EXIT_CHECK_FAILED, "%s cannot be removed", path);
}

/* Writes config.json and weights, in files of `most` bytes, into an existing folder. An older index is removed before
   its files are overwritten, and the new one is written when all files are complete. So the remains of an interrupted
   save are never taken for weights. Last, it removes older weights in the other form (one file, or several with an
   index), which readers would take for these. */
template <typename T> static void hf_save(const hf_model *m, decoder *d, const char *folder, int64_t most) {
    const tensor_dtype dtype = d->type == CF_DTYPE_FP32 ? TENSOR_F32 : TENSOR_BF16;
    hf_parts p = hf_parts_new(d, dtype, most);
    char name[64];
    write_config(m, d, folder, dtype);
    char *index = path_in(folder, "model.safetensors.index.json"), *whole = path_in(folder, "model.safetensors");
    if (p.n_parts > 1) remove_if_there(index);
    for (int64_t i = 0; i < p.n_parts; i++) {
        part_name(name, sizeof name, &p, i);
        char *path = path_in(folder, name);
        if (safetensors_write(path, p.sources + p.first[i], p.first[i + 1] - p.first[i], dtype, fetch_parameters<T>,
                              d) != CLI_OK)
            fail(EXIT_CHECK_FAILED, "%s cannot be written", path);
        free(path);
    }
    if (p.n_parts > 1) write_index(&p, index);
    remove_if_there(p.n_parts > 1 ? whole : index);
    free(index);
    free(whole);
    hf_parts_free(&p);
}

#endif /* TRAIN_HF_MODEL_H */
