/* safetensors.h - reads and writes the tensor files of Hugging Face models - MIT or public domain

   A file is 8 bytes (the length of the header, lowest first), the header (JSON: for each tensor its dtype, shape and
   data_offsets; "__metadata__"), and the data. A header is treated as hostile: all its claims are checked when the file
   is opened, and a fault is reported in one line that names the file and the tensor. Files are written in the layout of
   Hugging Face's own writer, tensors of one type by name, so one of its files is reproduced byte for byte.

   The chunkflow command's code reads JSON and writes files: link json_read.c, cli.c, cli_files.c and progress.c of
   tools/. Calls return its exit codes, 0 for success. Machines must be little-endian, as the format is. */

#ifndef TRAIN_SAFETENSORS_H
#define TRAIN_SAFETENSORS_H

#include "base.h"

#ifdef __cplusplus
extern "C" {
#endif
#include "../tools/command/json_read.h"
#ifdef __cplusplus
}
#endif

#include <sys/types.h>

#define SAFETENSORS_MAX_HEADER 100000000 /* the limit of other readers */
#define SAFETENSORS_MAX_DIMENSIONS 8
#define SAFETENSORS_NAME 128

typedef enum tensor_dtype { TENSOR_BF16, TENSOR_F16, TENSOR_F32, TENSOR_OTHER } tensor_dtype;

static inline const char *tensor_dtype_name(tensor_dtype dtype) {
    static const char *const names[] = {"BF16", "F16", "F32", "?"};
    return names[dtype];
}

static inline int64_t tensor_dtype_bytes(tensor_dtype dtype) { return dtype == TENSOR_F32 ? 4 : 2; }

typedef struct safetensor {
    char name[SAFETENSORS_NAME]; /* truncated: no requested name is that long */
    uint32_t node;               /* index of its name in the header */
    tensor_dtype dtype;
    int64_t n_dimensions, shape[SAFETENSORS_MAX_DIMENSIONS];
    int64_t begin, end;          /* bytes behind the header */
} safetensor;

typedef struct safetensors {
    FILE *file;
    char *text;              /* of the header */
    json_document header;
    safetensor *tensors;     /* (count) in the order of the header */
    int64_t count;
    int64_t data_at, data_bytes;
} safetensors;

static inline void safetensors_close(safetensors *s) {
    if (s->file) fclose(s->file);
    json_free(&s->header);
    free(s->text);
    free(s->tensors);
    memset(s, 0, sizeof *s);
}

/* ================================================================================================================
   >>open
   ================================================================================================================ */

/* Reports the fault of a tensor. */
static inline int tensor_wrong(const safetensors *s, const safetensor *t, const char *what) {
    return json_wrong(&s->header, t->node, "tensor %s: %s", t->name, what);
}

/* Reads the numbers of an array, at most `most`, none of them negative. */
static inline int read_numbers(const safetensors *s, const safetensor *t, uint32_t array, int64_t *out, int64_t most,
                               int64_t *n) {
    const json_node *nodes = s->header.nodes;
    uint32_t at = array + 1;
    int code = CLI_OK;
    *n = json_count(&s->header, array);
    if (*n > most) return tensor_wrong(s, t, "there are too many numbers in a list");
    for (int64_t i = 0; i < *n && code == CLI_OK; i++, at = nodes[at].next) {
        code = json_read_int(&s->header, at, t->name, &out[i]);
        if (code == CLI_OK && out[i] < 0) code = tensor_wrong(s, t, "a size or an offset is negative");
    }
    return code;
}

/* Returns the value of an object's member of this kind; 0 if there is none. Names are known to be unique. */
static inline uint32_t member_of(const json_document *d, uint32_t object, const char *name, json_kind kind) {
    uint32_t at = object + 1;
    char own[SAFETENSORS_NAME];
    for (int64_t i = json_count(d, object); i > 0; i--, at = d->nodes[at + 1].next) {
        json_copy_text(d, at, own, sizeof own);
        if (strcmp(own, name) == 0) return d->nodes[at + 1].kind == (uint32_t)kind ? at + 1 : 0;
    }
    return 0;
}

/* Returns the bytes of the shape; -1 if that exceeds `most`. */
static inline int64_t safetensor_bytes(const safetensor *t, int64_t most) {
    int64_t bytes = tensor_dtype_bytes(t->dtype);
    for (int64_t i = 0; i < t->n_dimensions; i++)
        if (t->shape[i] == 0) return 0;
    for (int64_t i = 0; i < t->n_dimensions; i++) {
        if (t->shape[i] > most / bytes) return -1;
        bytes *= t->shape[i];
    }
    return bytes;
}

static inline int check_place(const safetensors *s, const safetensor *t) {
    if (t->end < t->begin) return tensor_wrong(s, t, "data_offsets: the end lies before the beginning");
    if (t->end > s->data_bytes) return tensor_wrong(s, t, "data_offsets: they lead past the end of the file");
    if (t->dtype != TENSOR_OTHER && safetensor_bytes(t, s->data_bytes) != t->end - t->begin)
        return tensor_wrong(s, t, "data_offsets: they hold more or less than dtype and shape say");
    return CLI_OK;
}

/* Reads one tensor; *out must be all zero. */
static inline int read_tensor(const safetensors *s, uint32_t name, safetensor *out) {
    const json_document *d = &s->header;
    char dtype[16];
    int64_t offsets[2], n;
    out->node = name;
    json_copy_text(d, name, out->name, sizeof out->name);
    if (d->nodes[name + 1].kind != JSON_OBJECT) return tensor_wrong(s, out, "it is no object");
    const uint32_t type = member_of(d, name + 1, "dtype", JSON_STRING);
    const uint32_t shape = member_of(d, name + 1, "shape", JSON_ARRAY);
    const uint32_t places = member_of(d, name + 1, "data_offsets", JSON_ARRAY);
    if (!type || !shape || !places)
        return tensor_wrong(s, out, "wanted a dtype, a string, and shape and data_offsets, two arrays");
    json_copy_text(d, type, dtype, sizeof dtype);
    while (out->dtype < TENSOR_OTHER && strcmp(dtype, tensor_dtype_name(out->dtype)) != 0)
        out->dtype = (tensor_dtype)(out->dtype + 1);
    int code = read_numbers(s, out, shape, out->shape, SAFETENSORS_MAX_DIMENSIONS, &out->n_dimensions);
    if (code == CLI_OK) code = read_numbers(s, out, places, offsets, 2, &n);
    if (code != CLI_OK) return code;
    if (n != 2) return tensor_wrong(s, out, "data_offsets: wanted two numbers");
    out->begin = offsets[0];
    out->end = offsets[1];
    return check_place(s, out);
}

static inline int compare_places(const void *a, const void *b) {
    const safetensor *x = *(const safetensor *const *)a, *y = *(const safetensor *const *)b;
    if (x->begin != y->begin) return x->begin < y->begin ? -1 : 1;
    return x->end < y->end ? -1 : x->end > y->end;
}

/* Checks that every byte of the data belongs to one tensor. */
static inline int check_cover(const safetensors *s) {
    const safetensor **order = TAKE(const safetensor *, s->count);
    int64_t at = 0;
    int code = CLI_OK;
    for (int64_t i = 0; i < s->count; i++) order[i] = &s->tensors[i];
    qsort(order, (size_t)s->count, sizeof *order, compare_places);
    for (int64_t i = 0; i < s->count && code == CLI_OK; i++) {
        if (order[i]->begin < at) code = tensor_wrong(s, order[i], "data_offsets: it overlaps with another tensor");
        else if (order[i]->begin > at) code = tensor_wrong(s, order[i], "data_offsets: before it there is a hole");
        at = order[i]->end;
    }
    free(order);
    if (code == CLI_OK && at != s->data_bytes)
        code = cli_at_line(s->header.path, 1, "behind the last tensor there are %lld bytes more",
                           (long long)(s->data_bytes - at));
    return code;
}

static inline int read_tensors(safetensors *s) {
    const json_node *nodes = s->header.nodes;
    if (nodes[0].kind != JSON_OBJECT) return json_wrong(&s->header, 0, "the header is no object");
    const int64_t members = json_count(&s->header, 0);
    uint32_t at = 1;
    int code = CLI_OK;
    s->tensors = TAKE(safetensor, members);
    for (int64_t i = 0; i < members && code == CLI_OK; i++, at = nodes[at + 1].next) {
        char name[16];
        json_copy_text(&s->header, at, name, sizeof name);
        if (strcmp(name, "__metadata__") != 0) code = read_tensor(s, at, &s->tensors[s->count++]);
    }
    return code == CLI_OK ? check_cover(s) : code;
}

/* Reads the header's text, and finds the start of the data. */
static inline int read_header(safetensors *s, const char *path, uint64_t *bytes) {
    unsigned char length[8];
    if (fseeko(s->file, 0, SEEK_END) != 0) return cli_cannot_read(path);
    const int64_t size = (int64_t)ftello(s->file);
    if (size < 8) return cli_at_line(path, 1, "the file is too short for a safetensors file");
    if (fseeko(s->file, 0, SEEK_SET) != 0 || fread(length, 1, 8, s->file) != 8) return cli_cannot_read(path);
    *bytes = 0;
    for (int i = 7; i >= 0; i--) *bytes = *bytes << 8 | length[i];
    if (*bytes > SAFETENSORS_MAX_HEADER)
        return cli_at_line(path, 1, "its header claims %llu bytes, more than %d", (unsigned long long)*bytes,
                           SAFETENSORS_MAX_HEADER);
    if ((int64_t)*bytes > size - 8)
        return cli_at_line(path, 1, "its header claims %llu bytes, the file has %lld", (unsigned long long)*bytes,
                           (long long)(size - 8));
    s->data_at = 8 + (int64_t)*bytes;
    s->data_bytes = size - s->data_at;
    s->text = TAKE(char, (int64_t)*bytes + 1);
    return fread(s->text, 1, (size_t)*bytes, s->file) == (size_t)*bytes ? CLI_OK : cli_cannot_read(path);
}

/* Opens a file and checks everything that its header claims. On failure *out is all zero. `path` must outlive *out. */
static inline int safetensors_open(const char *path, safetensors *out) {
    uint64_t bytes = 0;
    memset(out, 0, sizeof *out);
    int code = cli_input_open(path, &out->file);
    if (code == CLI_OK) code = read_header(out, path, &bytes);
    if (code == CLI_OK) code = json_parse(path, out->text, (size_t)bytes, &out->header);
    if (code == CLI_OK) code = json_check(&out->header); /* a name twice, above all */
    if (code == CLI_OK) code = read_tensors(out);
    if (code != CLI_OK) safetensors_close(out);
    return code;
}

/* ================================================================================================================
   >>read
   ================================================================================================================ */

static inline const safetensor *safetensors_find(const safetensors *s, const char *name) {
    for (int64_t i = 0; i < s->count; i++)
        if (strcmp(s->tensors[i].name, name) == 0) return &s->tensors[i];
    return NULL;
}

/* Returns the tensor of this name and shape (columns 0: of one dimension), or NULL after a message. */
static inline const safetensor *safetensors_want(const safetensors *s, const char *name, int64_t rows,
                                                 int64_t columns) {
    const safetensor *t = safetensors_find(s, name);
    if (!t) {
        cli_at_line(s->header.path, 1, "tensor %s: it is missing", name);
        return NULL;
    }
    if (t->dtype == TENSOR_OTHER) {
        tensor_wrong(s, t, "its dtype must be BF16, F16 or F32");
        return NULL;
    }
    if (t->n_dimensions != (columns > 0 ? 2 : 1) || t->shape[0] != rows || (columns > 0 && t->shape[1] != columns)) {
        char wanted[80];
        int at = snprintf(wanted, sizeof wanted, "its shape must be [%lld", (long long)rows);
        if (columns > 0) at += snprintf(wanted + at, sizeof wanted - (size_t)at, ", %lld", (long long)columns);
        snprintf(wanted + at, sizeof wanted - (size_t)at, "]");
        tensor_wrong(s, t, wanted);
        return NULL;
    }
    return t;
}

static inline float float_of_bits(uint32_t bits) {
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

static inline float float_of_half(uint32_t half) {
    const uint32_t sign = (half & 0x8000u) << 16, exponent = half >> 10 & 31, fraction = half & 1023;
    if (exponent == 31) return float_of_bits(sign | 0x7F800000u | fraction << 13);
    if (exponent > 0) return float_of_bits(sign | (exponent + 112) << 23 | fraction << 13);
    return (sign ? -1.0f : 1.0f) * (float)fraction * 0x1p-24f;
}

/* Reads numbers first .. first + count of a tensor. On failure `out` is unchanged. */
static inline int safetensors_read(const safetensors *s, const safetensor *t, int64_t first, int64_t count,
                                   float *out) {
    const int64_t bytes = tensor_dtype_bytes(t->dtype);
    unsigned char *raw = TAKE(unsigned char, count * bytes);
    int code = CLI_OK;
    if (fseeko(s->file, (off_t)(s->data_at + t->begin + first * bytes), SEEK_SET) != 0 ||
        fread(raw, (size_t)bytes, (size_t)count, s->file) != (size_t)count)
        code = cli_cannot_read(s->header.path);
    for (int64_t i = 0; i < count && code == CLI_OK; i++) {
        uint16_t half = 0;
        if (t->dtype == TENSOR_F32) memcpy(&out[i], raw + 4 * i, 4);
        else memcpy(&half, raw + 2 * i, 2);
        if (t->dtype == TENSOR_BF16) out[i] = float_of_bits((uint32_t)half << 16);
        if (t->dtype == TENSOR_F16) out[i] = float_of_half(half);
    }
    free(raw);
    return code;
}

/* ================================================================================================================
   >>write
   ================================================================================================================ */

/* A tensor to be written, and the source of its bytes: `fetch` copies bytes first .. first + bytes of it to `to`. */
typedef struct tensor_source {
    const char *name; /* without quotes, backslashes and control characters */
    int64_t rows, columns; /* columns 0: of one dimension */
    int64_t index;    /* for `fetch` */
} tensor_source;

typedef void (*tensor_fetch_fn)(void *user, int64_t index, int64_t first, int64_t bytes, void *to);

static inline int64_t source_bytes(const tensor_source *t, tensor_dtype dtype) {
    return t->rows * (t->columns > 0 ? t->columns : 1) * tensor_dtype_bytes(dtype);
}

static inline int compare_sources(const void *a, const void *b) {
    return strcmp(((const tensor_source *)a)->name, ((const tensor_source *)b)->name);
}

static inline int64_t put_entry(char *to, int64_t room, const tensor_source *t, tensor_dtype dtype, int64_t at) {
    char shape[48];
    if (t->columns > 0) snprintf(shape, sizeof shape, "%lld,%lld", (long long)t->rows, (long long)t->columns);
    else snprintf(shape, sizeof shape, "%lld", (long long)t->rows);
    return snprintf(to, (size_t)room, ",\"%s\":{\"dtype\":\"%s\",\"shape\":[%s],\"data_offsets\":[%lld,%lld]}", t->name,
                    tensor_dtype_name(dtype), shape, (long long)at, (long long)(at + source_bytes(t, dtype)));
}

/* Returns the header's text, padded with blanks so that the data begins at a multiple of 8. */
static inline char *make_header(const tensor_source *tensors, int64_t n, tensor_dtype dtype, int64_t *length) {
    const int64_t room = 64 + n * (SAFETENSORS_NAME + 160);
    char *text = TAKE(char, room);
    int64_t at = 0;
    *length = snprintf(text, (size_t)room, "{\"__metadata__\":{\"format\":\"pt\"}");
    for (int64_t i = 0; i < n; i++) {
        *length += put_entry(text + *length, room - *length, &tensors[i], dtype, at);
        at += source_bytes(&tensors[i], dtype);
    }
    text[(*length)++] = '}';
    while (*length % 8 != 0) text[(*length)++] = ' ';
    return text;
}

#define TENSOR_PIECE ((int64_t)64 << 20) /* bytes fetched at a time */

/* Writes a file of these tensors, which it sorts. The file appears whole or not at all. */
static inline int safetensors_write(const char *path, tensor_source *tensors, int64_t n, tensor_dtype dtype,
                                    tensor_fetch_fn fetch, void *user) {
    cli_output output;
    unsigned char length[8];
    int64_t header_bytes;
    memset(&output, 0, sizeof output);
    int code = cli_output_open(&output, path);
    if (code != CLI_OK) return code;
    qsort(tensors, (size_t)n, sizeof *tensors, compare_sources);
    char *header = make_header(tensors, n, dtype, &header_bytes), *buffer = TAKE(char, TENSOR_PIECE);
    for (int i = 0; i < 8; i++) length[i] = (unsigned char)(header_bytes >> 8 * i);
    int ok = cli_write((const char *)length, 8, &output) == 0 && cli_write(header, (size_t)header_bytes, &output) == 0;
    for (int64_t i = 0; i < n && ok; i++) {
        const int64_t all = source_bytes(&tensors[i], dtype);
        for (int64_t first = 0; first < all && ok; first += TENSOR_PIECE) {
            const int64_t bytes = min_of(TENSOR_PIECE, all - first);
            fetch(user, tensors[i].index, first, bytes, buffer);
            ok = cli_write(buffer, (size_t)bytes, &output) == 0;
        }
    }
    free(header);
    free(buffer);
    return cli_outputs_finish(&output, 1, CLI_OK);
}

#endif /* TRAIN_SAFETENSORS_H */
