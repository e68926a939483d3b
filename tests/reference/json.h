/* json.h - a small strict JSON reader (RFC 8259), for checking the library's output.

   A document is an array of nodes in the order of the text; node 0 is the root. Duplicate keys are an error. */

#ifndef TEST_JSON_H
#define TEST_JSON_H

#include <stddef.h>
#include <stdint.h>

typedef enum json_type {
    JSON_NONE = 0, /* type of a missing node */
    JSON_NULL,
    JSON_FALSE,
    JSON_TRUE,
    JSON_NUMBER,
    JSON_STRING,
    JSON_ARRAY,
    JSON_OBJECT
} json_type;

typedef struct json_node {
    json_type type;
    const char *key; /* in an object: the key's text between its quotes */
    size_t key_bytes;
    const char *text; /* numbers: as written; strings: between the quotes, escapes as written */
    size_t bytes;
    int64_t size; /* items of an array or object */
    int64_t next; /* index of the next node after this one and its contents */
} json_node;

typedef struct json_document {
    json_node *nodes;
    int64_t n_nodes;
    const char *fault;  /* NULL, or the fault in the text */
    size_t fault_at;    /* byte at which it was found */
} json_document;

/* Parses a text, which must outlive the document. Free with json_free, after a fault as well. */
json_document json_parse(const char *text, size_t bytes);
void json_free(json_document *document);

/* Returns the node's index, or -1 if there is none; -1 as a parent gives -1. */
int64_t json_get(const json_document *document, int64_t parent, const char *key);
int64_t json_at(const json_document *document, int64_t parent, int64_t index);

json_type json_type_of(const json_document *document, int64_t node);
int64_t json_size(const json_document *document, int64_t node); /* -1 if it is neither array nor object */
/* 1 if the node is this integer, written as one */
int json_is_int(const json_document *document, int64_t node, int64_t value);
int json_is_string(const json_document *document, int64_t node, const char *value);
double json_double(const json_document *document, int64_t node); /* NaN if it is not a number */

#endif /* TEST_JSON_H */
