/* json.c - see json.h. */

#include "json.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define MOST_NESTED 64

typedef struct reader {
    const char *text;
    size_t bytes, at;
    json_document *document;
    int64_t capacity;
} reader;

static int fault(reader *r, const char *what) {
    if (!r->document->fault) {
        r->document->fault = what;
        r->document->fault_at = r->at;
    }
    return 0;
}

static int peek(const reader *r) {
    return r->at < r->bytes ? (unsigned char)r->text[r->at] : -1;
}

static int is_digit(int c) {
    return c >= '0' && c <= '9';
}

static void skip_space(reader *r) {
    while (peek(r) == ' ' || peek(r) == '\t' || peek(r) == '\n' || peek(r) == '\r') r->at++;
}

/* Adds a node at the end; returns its index, or -1. Nodes may move: keep indices. */
static int64_t add_node(reader *r, json_type type) {
    json_document *document = r->document;
    json_node *node;
    if (document->n_nodes == r->capacity) {
        int64_t capacity = r->capacity ? 2 * r->capacity : 64;
        json_node *nodes = (json_node *)realloc(document->nodes, (size_t)capacity * sizeof *nodes);
        if (!nodes) return fault(r, "out of memory") - 1;
        document->nodes = nodes;
        r->capacity = capacity;
    }
    node = &document->nodes[document->n_nodes];
    memset(node, 0, sizeof *node);
    node->type = type;
    return document->n_nodes++;
}

/* Starts after the opening quote and ends after the closing one. */
static int read_string(reader *r, const char **text, size_t *bytes) {
    size_t start = ++r->at;
    for (;;) {
        int c = peek(r), i;
        if (c < 0) return fault(r, "unterminated string");
        if (c < 0x20) return fault(r, "control character in a string");
        if (c == '"') break;
        r->at++;
        if (c != '\\') continue;
        c = peek(r);
        if (c < 0 || !strchr("\"\\/bfnrtu", c)) return fault(r, "bad escape");
        r->at++;
        for (i = 0; c == 'u' && i < 4; i++, r->at++)
            if (peek(r) < 0 || !strchr("0123456789abcdefABCDEF", peek(r))) return fault(r, "bad \\u escape");
    }
    *text = r->text + start;
    *bytes = r->at - start;
    r->at++;
    return 1;
}

static int read_digits(reader *r) {
    if (!is_digit(peek(r))) return fault(r, "digit expected");
    while (is_digit(peek(r))) r->at++;
    return 1;
}

static int read_number(reader *r, json_node *node) {
    size_t start = r->at;
    if (peek(r) == '-') r->at++;
    if (peek(r) == '0') {
        r->at++;
        if (is_digit(peek(r))) return fault(r, "leading zero");
    } else if (!read_digits(r)) {
        return 0;
    }
    if (peek(r) == '.') {
        r->at++;
        if (!read_digits(r)) return 0;
    }
    if (peek(r) == 'e' || peek(r) == 'E') {
        r->at++;
        if (peek(r) == '+' || peek(r) == '-') r->at++;
        if (!read_digits(r)) return 0;
    }
    node->text = r->text + start;
    node->bytes = r->at - start;
    return 1;
}

static int read_word(reader *r, const char *word) {
    size_t length = strlen(word);
    if (r->bytes - r->at < length || memcmp(r->text + r->at, word, length) != 0) return fault(r, "value expected");
    r->at += length;
    return 1;
}

static int read_value(reader *r, int depth);

static int key_is_new(const json_document *document, int64_t parent, int64_t child) {
    const json_node *wanted = &document->nodes[child];
    int64_t i, k = parent + 1;
    for (i = 0; i < document->nodes[parent].size; i++, k = document->nodes[k].next) {
        const json_node *other = &document->nodes[k];
        if (other->key_bytes == wanted->key_bytes && memcmp(other->key, wanted->key, wanted->key_bytes) == 0) return 0;
    }
    return 1;
}

static int read_member(reader *r, int64_t parent, int depth) {
    const char *key = NULL;
    size_t key_bytes = 0;
    int64_t child = r->document->n_nodes;
    if (r->document->nodes[parent].type == JSON_OBJECT) {
        skip_space(r);
        if (peek(r) != '"') return fault(r, "key expected");
        if (!read_string(r, &key, &key_bytes)) return 0;
        skip_space(r);
        if (peek(r) != ':') return fault(r, "':' expected");
        r->at++;
    }
    if (!read_value(r, depth)) return 0;
    r->document->nodes[child].key = key;
    r->document->nodes[child].key_bytes = key_bytes;
    if (key && !key_is_new(r->document, parent, child)) return fault(r, "duplicate key");
    r->document->nodes[parent].size++;
    return 1;
}

static int read_container(reader *r, json_type type, char close, int depth) {
    int64_t self = add_node(r, type);
    if (self < 0) return 0;
    if (depth >= MOST_NESTED) return fault(r, "nested too deep");
    r->at++;
    skip_space(r);
    if (peek(r) != close) {
        for (;;) {
            if (!read_member(r, self, depth + 1)) return 0;
            skip_space(r);
            if (peek(r) == close) break;
            if (peek(r) != ',') return fault(r, "',' or the end of the container expected");
            r->at++;
        }
    }
    r->at++;
    r->document->nodes[self].next = r->document->n_nodes;
    return 1;
}

static int read_scalar(reader *r) {
    int c = peek(r);
    json_type type = c == '"' ? JSON_STRING : c == 't' ? JSON_TRUE : c == 'f' ? JSON_FALSE
                   : c == 'n' ? JSON_NULL : JSON_NUMBER;
    int64_t self = add_node(r, type);
    json_node *node;
    if (self < 0) return 0;
    node = &r->document->nodes[self];
    node->next = self + 1;
    switch (type) {
        case JSON_STRING: return read_string(r, &node->text, &node->bytes);
        case JSON_TRUE: return read_word(r, "true");
        case JSON_FALSE: return read_word(r, "false");
        case JSON_NULL: return read_word(r, "null");
        default: return read_number(r, node);
    }
}

static int read_value(reader *r, int depth) {
    skip_space(r);
    if (peek(r) == '{') return read_container(r, JSON_OBJECT, '}', depth);
    if (peek(r) == '[') return read_container(r, JSON_ARRAY, ']', depth);
    return read_scalar(r);
}

json_document json_parse(const char *text, size_t bytes) {
    json_document document = {0};
    reader r = {0};
    r.text = text;
    r.bytes = bytes;
    r.document = &document;
    if (read_value(&r, 0)) {
        skip_space(&r);
        if (r.at != bytes) fault(&r, "text after the end of the document");
    }
    return document;
}

void json_free(json_document *document) {
    free(document->nodes);
    memset(document, 0, sizeof *document);
}

json_type json_type_of(const json_document *document, int64_t node) {
    return node < 0 || node >= document->n_nodes ? JSON_NONE : document->nodes[node].type;
}

int64_t json_size(const json_document *document, int64_t node) {
    json_type type = json_type_of(document, node);
    return type == JSON_ARRAY || type == JSON_OBJECT ? document->nodes[node].size : -1;
}

int64_t json_get(const json_document *document, int64_t parent, const char *key) {
    int64_t i, k = parent + 1;
    if (json_type_of(document, parent) != JSON_OBJECT) return -1;
    for (i = 0; i < document->nodes[parent].size; i++, k = document->nodes[k].next) {
        const json_node *node = &document->nodes[k];
        if (node->key_bytes == strlen(key) && memcmp(node->key, key, node->key_bytes) == 0) return k;
    }
    return -1;
}

int64_t json_at(const json_document *document, int64_t parent, int64_t index) {
    int64_t i, k = parent + 1;
    if (index < 0 || index >= json_size(document, parent)) return -1;
    for (i = 0; i < index; i++) k = document->nodes[k].next;
    return k;
}

int json_is_int(const json_document *document, int64_t node, int64_t value) {
    char text[32];
    size_t bytes = (size_t)snprintf(text, sizeof text, "%lld", (long long)value);
    return json_type_of(document, node) == JSON_NUMBER && document->nodes[node].bytes == bytes &&
           memcmp(document->nodes[node].text, text, bytes) == 0;
}

int json_is_string(const json_document *document, int64_t node, const char *value) {
    return json_type_of(document, node) == JSON_STRING && document->nodes[node].bytes == strlen(value) &&
           memcmp(document->nodes[node].text, value, strlen(value)) == 0;
}

double json_double(const json_document *document, int64_t node) {
    char text[64];
    if (json_type_of(document, node) != JSON_NUMBER || document->nodes[node].bytes >= sizeof text) return (double)NAN;
    memcpy(text, document->nodes[node].text, document->nodes[node].bytes);
    text[document->nodes[node].bytes] = 0;
    return strtod(text, NULL);
}
