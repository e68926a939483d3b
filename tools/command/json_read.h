/* json_read.h - a strict reader of JSON (RFC 8259) for untrusted files: exactly one value, bounded depth, UTF-8 and
   escapes checked, whole numbers exact. Errors are reported as FILE:LINE. */

#ifndef CHUNKFLOW_JSON_READ_H
#define CHUNKFLOW_JSON_READ_H

#include "cli.h"

#define JSON_MAX_DEPTH 16
#define JSON_MAX_BYTES ((size_t)1 << 31) /* of a file: offsets have 32 bits */

typedef enum json_kind {
    JSON_NULL, JSON_FALSE, JSON_TRUE, JSON_NUMBER, JSON_STRING, JSON_ARRAY, JSON_OBJECT
} json_kind;

/* A value. The values inside it follow it: an array's one after another, an object's as name, value, name, value. The
   first value inside is the next node; `next` skips everything inside. */
typedef struct json_node {
    uint32_t kind;       /* a json_kind */
    uint32_t begin, end; /* its bytes in the text, a string's without the quotes */
    uint32_t next;       /* the node after it */
} json_node;

typedef struct json_document {
    const char *path; /* for messages */
    const char *text; /* the caller's, which must outlive the document; a zero byte ends it */
    char *own;        /* after json_file_read: the same text, which json_free frees; or NULL */
    json_node *nodes; /* node 0 is the outermost value */
    uint32_t n_nodes;
} json_document;

/* Parses a text. text[bytes] must be zero, as cli_file_read leaves it. Returns an exit code; after CLI_OK call
   json_free. */
int json_parse(const char *path, const char *text, size_t bytes, json_document *out);
void json_free(json_document *document);

/* Reads and parses a whole file of at most max_bytes. */
int json_file_read(const char *path, size_t max_bytes, json_document *out);

/* Returns the number of values in an array, or of members in an object. */
int64_t json_count(const json_document *document, uint32_t node);

/* Reports an error in a node and returns CLI_WRONG. */
int json_wrong(const json_document *document, uint32_t node, const char *format, ...) CLI_FORMAT(3, 4);

/* Checks the members that json_read_object does not know in the same way as those that it knows: refuses a name that an
   object has twice, and a number that does not fit into 63 bits or a double. Use it for files that nobody should trust
   after such an error. Returns an exit code. */
int json_check(const json_document *document);

/* Copies a string with its escapes resolved, as much as fits, and a zero byte. */
void json_copy_text(const json_document *document, uint32_t node, char *out, size_t size);

/* The type of the variable that a member of an object is read into. */
typedef enum json_type {
    JSON_INT,      /* int64_t: a whole number without point or exponent */
    JSON_COUNT,    /* int64_t: like JSON_INT, above 0 */
    JSON_EACH,     /* int64_t: like JSON_COUNT, or an array that repeats one such number */
    JSON_INT32,    /* int32_t: like JSON_INT */
    JSON_REAL,     /* double: any finite number */
    JSON_BOOL,     /* int */
    JSON_WORD,     /* int64_t: index of a string among those of `word`, from 0 */
    JSON_TEXT_OF,  /* uint32_t: the node of a string */
    JSON_ARRAY_OF, /* uint32_t: the node of an array, its elements unread */
    JSON_OBJECT_OF,/* uint32_t: the node of an object, its members unread */
    JSON_NODE_OF   /* uint32_t: the node of any value */
} json_type;

typedef struct json_field {
    const char *name;
    json_type type;
    size_t offset;            /* of the member in the struct that is filled */
    int optional;             /* 1: may be missing; the member is then unchanged and its bit in *seen is 0 */
    int nullable;             /* 1: null is the same as missing */
    /* returns words, such as the library's names of an enum; "?" after the last one */
    const char *(*word)(int64_t place);
} json_field;

#define JSON_MAX_FIELDS 64

/* Fills a struct from an object by a table that ends with an entry without a name. Members that are not in the table
   are skipped; one that occurs twice is an error. seen: gets a bit for each entry of the table; may be NULL. Returns an
   exit code. */
int json_read_object(const json_document *document, uint32_t node, const json_field *fields, void *out, uint64_t *seen);

/* Refuses the members of an object that are not in a table. */
int json_refuse_others(const json_document *document, uint32_t node, const json_field *fields);

/* Reads one value alone. */
int json_read_int(const json_document *document, uint32_t node, const char *name, int64_t *out);

/* Returns the bytes of the UTF-8 sequence at text[0 .. n), 0 if there is none. It accepts no overlong forms, no
   surrogates, nothing above U+10FFFF. */
uint32_t json_utf8_length(const unsigned char *text, uint32_t n);

#endif /* CHUNKFLOW_JSON_READ_H */
